// What CPUs have for products of weights of few bits, four of an output at a time.
#pragma once

#include "integers.h"

typedef int8_t Quads __attribute__((vector_size(LANES * 4))); // four numbers in each lane

// In each lane, the products of four weights with four inputs, added to a sum.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
}
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
}
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
// Pairs of products are added in 16 bits, and cut off where they do not fit. So a weight's sign moves to its input: two
// products of at most 128 * 127 fit.
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
#if defined(__AVX512BW__)
    if constexpr (BITS == 8) {
        __mmask64 are_negative = _mm512_movepi8_mask((__m512i)weights);
        inputs = (Quads)_mm512_mask_sub_epi8((__m512i)inputs, are_negative, __m512i{}, (__m512i)inputs);
        weights = (Quads)_mm512_abs_epi8((__m512i)weights);
    }
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
    return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    if constexpr (BITS == 8) {
        inputs = (Quads)_mm256_sign_epi8((__m256i)inputs, (__m256i)weights);
        weights = (Quads)_mm256_abs_epi8((__m256i)weights);
    }
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs);
    return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    return vdotq_s32(sum, weights, inputs);
}
#elif defined(__aarch64__)
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    int16x8_t lower = vmull_s8(vget_low_s8(weights), vget_low_s8(inputs)), upper = vmull_high_s8(weights, inputs);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(lower), vpaddlq_s16(upper)));
}
#elif defined(__SSE2__)
template <int BITS> static inline Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    auto lower = [](__m128i bytes) { return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8); };
    auto upper = [](__m128i bytes) { return _mm_srai_epi16(_mm_unpackhi_epi8(bytes, bytes), 8); };
    for (int i = 0; i < LANES / 4; i++) {
        __m128i few, with, total;
        memcpy(&few, (char*)&weights + i * sizeof(few), sizeof(few));
        memcpy(&with, (char*)&inputs + i * sizeof(few), sizeof(few));
        memcpy(&total, (char*)&sum + i * sizeof(few), sizeof(few));
        __m128 left = _mm_castsi128_ps(_mm_madd_epi16(lower(few), lower(with)));
        __m128 right = _mm_castsi128_ps(_mm_madd_epi16(upper(few), upper(with)));
        __m128i even = _mm_castps_si128(_mm_shuffle_ps(left, right, 0x88)), odd = _mm_castps_si128(_mm_shuffle_ps(left, right, 0xdd));
        total = _mm_add_epi32(total, _mm_add_epi32(even, odd));
        memcpy((char*)&sum + i * sizeof(few), &total, sizeof(few));
    }
    return sum;
}
#else
template <int BITS> __attribute__((noinline)) static Integers dot_quads(Quads weights, Quads inputs, Integers sum) {
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) sum[lane] += int32_t(weights[lane * 4 + i]) * inputs[lane * 4 + i];
    return sum;
}
#endif

// Products of few bits are so small that several fit into 16 bits, where x86 adds them, unless it has the instruction above
// for sums of 32 bits.
#if defined(__AVX512BW__)
constexpr bool HAS_SHORTS = !HAS_UNSIGNED;
static inline Quads add_products(Quads weights, Quads inputs, Quads sum) {
    __m512i total = _mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs));
    asm("" : "+v"(total)); // GCC would make all products first and then add them in pairs, for which it has no registers
    return (Quads)total;
}
static inline Integers widened(Quads sums) { return (Integers)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HAS_SHORTS = !HAS_UNSIGNED;
static inline Quads add_products(Quads weights, Quads inputs, Quads sum) {
    __m256i total = _mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs));
    asm("" : "+v"(total)); // GCC would make all products first and then add them in pairs, for which it has no registers
    return (Quads)total;
}
static inline Integers widened(Quads sums) { return (Integers)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#else
constexpr bool HAS_SHORTS = false;
static inline Quads add_products(Quads, Quads, Quads sum) { return sum; }
static inline Integers widened(Quads) { return Integers{}; }
#endif

static inline Quads load_quads(const uint8_t* from) {
    Quads vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

static inline Quads splat_quad(const int8_t* from) {
    int32_t four;
    memcpy(&four, from, sizeof(four));
    return (Quads)(four - Integers{});
}

/// left * right + sum, rounded once on every CPU, unlike `fused`.
#if defined(__FMA__) || defined(__aarch64__)
static inline Vector fused_exactly(Vector left, Vector right, Vector sum) { return fused(left, right, sum); }
#else
__attribute__((noinline)) static Vector fused_exactly(Vector left, Vector right, Vector sum) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] = std::fma(left[lane], right[lane], sum[lane]);
    return sum;
}
#endif

static inline Vector load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vld1_f16((const __fp16*)from));
#else
    Halves halves;
    memcpy(&halves, from, sizeof(halves));
    Bits bits = __builtin_convertvector(halves, Bits);
    Vector numbers = same_bits<Vector>((bits & 0x7fffu) << 13) * 0x1p112f;
    return same_bits<Vector>(same_bits<Bits>(numbers) | (bits & 0x8000u) << 16);
#endif
}

/// Bytes as whole numbers of 32 bits.
static inline Integers load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    UnsignedBytes bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(bytes, Integers);
#endif
}
