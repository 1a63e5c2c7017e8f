// Vectors of floats in the width of this CPU, through the vector extensions that GCC and Clang share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

// Of what is called with vectors, which would go through memory; GCC makes calls of the larger functions.
#define INLINED __attribute__((always_inline)) static inline

/// Whether the CPU multiplies bfloat16 numbers by themselves, two at once.
#if defined(__AVX512BF16__)
constexpr bool HAS_DOTS = true;
#else
constexpr bool HAS_DOTS = false;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

/// A bfloat16: the upper half of a float's bits.
struct BFloat16 {
    uint16_t bits;
};

template <class To, class From> static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

static inline Vector splat(float value) { return value - Vector{}; }

/// A pair of numbers in each lane, the first in its lower half.
static inline Bits load_pairs(const BFloat16* from) {
    Bits vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

/// The same pair in all lanes.
static inline Bits splat(const BFloat16* pair) {
    uint32_t bits;
    memcpy(&bits, pair, sizeof(bits));
    return bits - Bits{};
}

static inline Vector load(const float* from) {
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

static inline Vector load(const BFloat16* from) {
#if defined(__AVX512F__) // GCC would widen each half of the vector by itself
    return same_bits<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
#endif
    Halves halves;
    memcpy(&halves, from, sizeof(halves));
    return same_bits<Vector>(__builtin_convertvector(halves, Bits) << 16);
}

static inline Vector load(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    Bytes bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(bytes, Vector);
#endif
}

/// left * right + sum, rounded once where the CPU can. Compilers are told not to make it of products and sums by
/// themselves (-ffp-contract=off): they do in one loop and not in another, and results would no longer be the same.
static inline Vector fused(Vector left, Vector right, Vector sum) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(left, right, sum);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(left, right, sum);
#elif defined(__aarch64__)
    return vfmaq_f32(sum, left, right);
#else
    return left * right + sum;
#endif
}

/// In each lane, left * right + sum of a pair of bfloat16 numbers; only where `HAS_DOTS`.
static inline Vector dot_bf16([[maybe_unused]] Bits left, [[maybe_unused]] Bits right, Vector sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, same_bits<__m512bh>(left), same_bits<__m512bh>(right));
#else
    return sum;
#endif
}

static inline void store(float* to, Vector vector) { memcpy(to, &vector, sizeof(vector)); }

static inline float number(float from) { return from; }
static inline float number(BFloat16 from) { return same_bits<float>(uint32_t(from.bits) << 16); }

template <class T> T stored(float value);
template <> inline float stored<float>(float value) { return value; }
/// Rounded to the nearest, ties to even, as torch does.
template <> inline BFloat16 stored<BFloat16>(float value) {
    if (std::isnan(value)) return {0x7fc0};
    uint32_t bits = same_bits<uint32_t>(value);
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

static inline void store(BFloat16* to, Vector vector) {
    Bits bits = same_bits<Bits>(vector);
    bits = vector == vector ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0 - Bits{};
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)bits));
    return;
#endif
    Halves halves = __builtin_convertvector(bits, Halves);
    memcpy(to, &halves, sizeof(halves));
}

/// The sum of the lanes, by halves: always in the same order.
static inline float sum(Vector vector) {
#if defined(__AVX__)
#if defined(__AVX512F__)
    __m256 eight = _mm256_add_ps(
        _mm512_castps512_ps256(vector), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(vector), 1))
    );
#else
    __m256 eight = vector;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (vector[0] + vector[2]) + (vector[1] + vector[3]);
#endif
}

/// The sums of the lanes of four vectors, all in the same order.
INLINED void sum_four(const Vector (&from)[4], float* to) {
#if defined(__AVX512F__)
    // By halves; what has been added makes room for another vector's.
    auto halves = [](__m512 left, __m512 right) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(left, right, 0x44), _mm512_shuffle_f32x4(left, right, 0xee));
    };
    __m512 lower = halves(from[0], from[1]), upper = halves(from[2], from[3]);
    __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(lower, upper, 0x88), _mm512_shuffle_f32x4(lower, upper, 0xdd));
    __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
    __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one)));
#else
    for (int i = 0; i < 4; i++) to[i] = sum(from[i]);
#endif
}

/// The same of two times four vectors, with fewer shuffles.
INLINED void sum_eight(const Vector (&left)[4], const Vector (&right)[4], float* to_left, float* to_right) {
#if defined(__AVX512F__)
    __m512 half[4], quarter[2];
    for (int i = 0; i < 4; i++)
        half[i] = _mm512_add_ps(
            _mm512_mask_blend_ps(0xff00, left[i], right[i]), _mm512_shuffle_f32x4(left[i], right[i], 0x4e)
        );
    for (int i = 0; i < 2; i++) {
        __m512 even = half[2 * i], odd = half[2 * i + 1], crossed = _mm512_mask_blend_ps(0xf0f0, odd, even);
        quarter[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, even, odd), _mm512_shuffle_f32x4(crossed, crossed, 0xb1));
    }
    __m512d first = _mm512_castps_pd(quarter[0]), second = _mm512_castps_pd(quarter[1]);
    __m512 two = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(first, second)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, second))
    );
    __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    __m256 both = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
    _mm_storeu_ps(to_left, _mm256_castps256_ps128(both));
    _mm_storeu_ps(to_right, _mm256_extractf128_ps(both, 1));
#else
    sum_four(left, to_left);
    sum_four(right, to_right);
#endif
}

/// The largest lane.
static inline float largest(Vector vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(vector);
#endif
    float found = vector[0];
    for (int lane = 1; lane < LANES; lane++) found = vector[lane] > found ? vector[lane] : found;
    return found;
}

static inline int32_t largest(Integers vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)vector);
#endif
    int32_t found = vector[0];
    for (int lane = 1; lane < LANES; lane++) found = vector[lane] > found ? vector[lane] : found;
    return found;
}

static inline int32_t sum(Integers vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)vector);
#endif
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += vector[lane];
    return total;
}

/// e to the power of each lane, to about 2 units in the last place; below -87 it is 0.
INLINED Vector exponential(Vector x) {
    auto is_nothing = x < -87.0f;
    x = x > 88.0f ? splat(88.0f) : x;
    const Vector shift = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    Vector shifted = x * 1.44269504088896341f + shift;
    Vector whole = shifted - shift;
    Vector rest = x - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    Vector series = fused(rest, splat(1.9875691500e-4f), splat(1.3981999507e-3f)); // Cephes, expf
    series = fused(series, rest, splat(8.3334519073e-3f));
    series = fused(series, rest, splat(4.1665795894e-2f));
    series = fused(series, rest, splat(1.6666665459e-1f));
    series = fused(series, rest, splat(5.0000001201e-1f));
    series = fused(series, rest * rest, rest + 1.0f);
    Integers power = __builtin_convertvector(whole, Integers);
    return is_nothing ? Vector{} : series * same_bits<Vector>((power + 127) << 23);
}
