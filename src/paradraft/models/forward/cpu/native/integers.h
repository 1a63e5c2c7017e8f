// Products with weights of 8 or 4 bits; models/quantized.py defines them. What is multiplied is rounded to 8 bits, the
// products of a block of inputs and their sum are whole numbers, and blocks are added up in float32 in their order. So a
// row's result is the same to the last bit whatever rows are beside it, and whichever instructions compute it.
#pragma once

#include <algorithm>

#include "tiles.h"

constexpr int64_t BLOCK = 32; // inputs of a row that are rounded with one scale
constexpr int QUADS = BLOCK / 4;

/// How scales or offsets of groups are stored; their values are those of `quantized.NumberKind`.
enum NumberKind : int64_t {
    NONE,
    FLOATS,
    HALVES,   // float16 numbers
    PRODUCTS, // a float16 number for `SUPERBLOCK` inputs times a whole number for each group, as in llama.cpp's K-quants
};

constexpr int64_t SUPERBLOCK = 256;

/// How weights of few bits are stored.
struct Grouping {
    int64_t bits;    // 4, 5, 6 or 8
    int64_t group;   // inputs that share a scale, half a block or a multiple of one; 0 if all inputs of an output do
    int64_t scales;  // a kind of `NumberKind`
    int64_t offsets; // likewise; a weight is scale * value + offset. `PRODUCTS` have 6 bits, and 8 where there are none

    /// Groups of a block, and blocks after a header with the scales and offsets of these.
    int64_t parts() const { return group && group < BLOCK ? BLOCK / group : 1; }
    int64_t header_blocks() const { return scales == PRODUCTS ? SUPERBLOCK / BLOCK : group > BLOCK ? group / BLOCK : 1; }
    int64_t header_bytes() const {
        if (!group) return 0;
        if (scales == PRODUCTS && offsets) return N_TILE * (2 * 2 + 3 * header_blocks() / 2);
        if (scales == PRODUCTS) return N_TILE * (2 + header_blocks() * parts());
        return N_TILE * parts() * (size_of(scales) + size_of(offsets));
    }
    /// Bits from the fifth on are after the first four of all weights of a block.
    int64_t block_bytes() const { return BLOCK * N_TILE * bits / 8; }
    /// Bytes of the first `blocks` blocks of a panel, and their headers.
    int64_t bytes(int64_t blocks) const {
        int64_t headers = group ? (blocks + header_blocks() - 1) / header_blocks() : 0;
        return blocks * block_bytes() + headers * header_bytes();
    }

    static constexpr int64_t size_of(int64_t numbers) { return numbers == FLOATS ? 4 : numbers == NONE ? 0 : 2; }
};

/// Whether the CPU multiplies weights from 0 to 255 with inputs that have signs, and adds four products at once.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr bool HAS_UNSIGNED = true;
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HAS_UNSIGNED = true;
#else
constexpr bool HAS_UNSIGNED = false;
#endif

/// What is added to every weight when it is stored, so that it is not negative; what that adds to a block's sum is taken away.
constexpr int32_t shift_of(int64_t bits, bool has_offsets) {
    return has_offsets ? 0 : bits < 8 ? 1 << (bits - 1) : HAS_UNSIGNED ? 128 : 0;
}

/// Weights as they are before they are packed, of one or more outputs. Of G groups, or S superblocks of K inputs, an output has
/// K values; G scales and offsets, or S where they are `PRODUCTS` of these and of G whole numbers.
struct Weights {
    int8_t* values;
    void *scales, *offsets;
    int8_t *scale_numbers, *offset_numbers;
};

static inline int64_t blocks_of(int64_t inputs) { return (inputs + BLOCK - 1) / BLOCK; }

/// A block of a row's inputs, rounded to whole numbers from -127 to 127 and a scale.
struct RoundedBlock {
    int8_t values[BLOCK]; // 0 after the last input
    float scale;
    float float_sum;
    int32_t sum, first_sum; // of the values, and of their first half
};

/// Rows of inputs, rounded.
struct Rounded {
    const RoundedBlock* all; // [blocks, rows]: what is multiplied with the same weights is in one place
    int64_t rows, blocks;

    Rounded from(int64_t row, int64_t block) const { return {all + block * rows + row, rows, blocks - block}; }
};

/// Rounds at most a block of numbers. The scale is NaN if one of them is NaN or infinite.
static inline void round_block(const float* from, int64_t count, RoundedBlock& to) {
    alignas(64) float padded[BLOCK] = {};
    if (count < BLOCK) from = std::copy_n(from, count, padded) - count;
    Integers most = {}; // sizes are in the order of their bits, NaN after all others
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        Integers size = same_bits<Integers>(load(from + i)) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t bits = largest(most);
    float found = bits < 0x7f800000 ? same_bits<float>(bits) : NAN;
    float factor = found < 0x1p-119f ? 0.0f : 127.0f / found; // 127 / found is finite, and so is a number times it
    to.scale = found < 0x1p-119f ? 0.0f : found * (1.0f / 127.0f);
    const Vector shift = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number, ties to even
    Integers totals[2] = {};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        Vector whole = (load(from + i) * factor + shift) - shift;
        Integers numbers = __builtin_convertvector(whole == whole ? whole : Vector{}, Integers);
        Bytes bytes = __builtin_convertvector(numbers, Bytes);
        memcpy(to.values + i, &bytes, sizeof(bytes));
        totals[i * 2 / BLOCK] += numbers;
    }
    to.sum = sum(totals[0] + totals[1]);
    to.float_sum = float(to.sum);
    to.first_sum = sum(totals[0]);
}

/// A float16 number, of those that are no NaN and not infinite.
static inline float half_number(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    float number = same_bits<float>(rest << 13) * 0x1p112f; // the exponents' zeros are that far apart
    return same_bits<float>(same_bits<uint32_t>(number) | sign);
}

static inline int64_t groups_of(const Grouping& grouping, int64_t inputs) {
    return grouping.group ? (inputs + grouping.group - 1) / grouping.group : 0;
}

/// At most `M_BLOCK` rows times one panel; sets each row's `N_TILE` sums.
void multiply_integers(
    const uint8_t* panel, const Grouping& grouping, const Rounded& inputs, int64_t rows, float (*sums)[N_TILE]
);

/// Sets the panel of the `outputs` first outputs that `from` has, at most `N_TILE`.
void pack_panel(const Weights& from, int64_t outputs, int64_t inputs, const Grouping& grouping, uint8_t* to);

/// Sets `to` to what `pack_panel` was given of one output.
void unpack_output(const uint8_t* panels, int64_t inputs, const Grouping& grouping, int64_t output, const Weights& to);

/// How many numbers an output has of its scales, and as many of its offsets.
static inline int64_t numbers_of(const Grouping& grouping, int64_t inputs) {
    if (grouping.scales == PRODUCTS) return (inputs + SUPERBLOCK - 1) / SUPERBLOCK;
    return groups_of(grouping, inputs);
}

/// Where the weights of an output are.
Weights from_output(const Weights& weights, int64_t output, int64_t inputs, const Grouping& grouping);
