// Kernels of products with weights of few bits, and the order in which these are stored.

#include "quads.h"

#include <vector>

/// How blocks and their headers are stored, known when kernels are compiled. `GROUPS` are those of a block that have scales in
/// its header: 0 where an output has one scale.
template <int BITS_, int GROUPS, NumberKind SCALES, NumberKind OFFSETS> struct Stored {
    static constexpr int BITS = BITS_;
    static constexpr bool HAS_SCALES = GROUPS > 0, HAS_OFFSETS = OFFSETS != NONE;
    static constexpr bool HAS_PRODUCTS = SCALES == PRODUCTS;
    static constexpr int PARTS = GROUPS == 2 ? 2 : 1; // that a block is cut into

    /// Four weights of some outputs, and of a block whose values begin at `from`.
    static Quads weights(const uint8_t* from, int quad, int64_t output) {
        if constexpr (BITS == 8) return load_quads(from + (quad * N_TILE + output) * 4);
        Bits nibbles = (same_bits<Bits>(load_quads(from + (quad / 2 * N_TILE + output) * 4)) >> (quad % 2 * 4)) & 0x0f0f0f0fu;
        if constexpr (BITS == 5 || BITS == 6) {
            constexpr int MORE = BITS - 4, QUADS_OF_A_WORD = 8 / MORE;
            const uint8_t* upper = from + BLOCK / 2 * N_TILE + (quad / QUADS_OF_A_WORD * N_TILE + output) * 4;
            Bits word = same_bits<Bits>(load_quads(upper));
            int shift = 4 - quad % QUADS_OF_A_WORD * MORE;
            nibbles |= (shift < 0 ? word >> -shift : word << shift) & (0x10101010u * ((1 << MORE) - 1));
        }
        return (Quads)nibbles;
    }

    /// The scales of some outputs for a part of a block; `block` counts from the header on.
    static Vector scales(const uint8_t* header, int block, int part, int64_t output) {
        if constexpr (SCALES == PRODUCTS && HAS_OFFSETS)
            return factors(header, output) * number(sixes(header, block, output, block % 2 ? 2 : 0) & 63);
        if constexpr (SCALES == PRODUCTS) {
            Integers bytes = load_bytes(header + N_TILE * (2 + block * PARTS + part) + output);
            return factors(header, output) * number((bytes << 24) >> 24);
        }
        return numbers<SCALES>(header, part * N_TILE + output);
    }

    static Vector offsets(const uint8_t* header, int block, int part, int64_t output) {
        if constexpr (OFFSETS == PRODUCTS) {
            Integers numbers = sixes(header, block, output, 1);
            if (block % 2) {
                Integers low = sixes(header, block, output, 0) >> 6, high = sixes(header, block, output, 2) >> 6;
                numbers = low | ((numbers >> 6) << 2) | (high << 4);
            }
            return factors(header + N_TILE * 2, output) * number(numbers & 63);
        }
        return numbers<OFFSETS>(header + PARTS * N_TILE * Grouping::size_of(SCALES), part * N_TILE + output);
    }

  private:
    template <NumberKind KIND> static Vector numbers(const uint8_t* from, int64_t at) {
        if constexpr (KIND == HALVES) return load_halves(from + at * 2);
        return load((const float*)from + at);
    }
    static Vector factors(const uint8_t* from, int64_t output) { return load_halves(from + output * 2); }
    static Vector number(Integers numbers) { return __builtin_convertvector(numbers, Vector); }
    /// One of the three rows of bytes that two blocks have for numbers of 6 bits: the first block's scale, its offset, and the
    /// second's scale; the second's offset is in their upper bits, the lowest first.
    static Integers sixes(const uint8_t* header, int block, int64_t output, int row) {
        return load_bytes(header + N_TILE * (4 + block / 2 * 3 + row) + output);
    }
};

/// A block whose weights are bytes, and whose scales and offsets are floats.
struct UnpackedBlock {
    uint8_t values[BLOCK * N_TILE];
    float scales[2][N_TILE], offsets[N_TILE]; // of its parts
};

/// How these are read.
template <int BITS_, int PARTS_, bool SCALES, bool OFFSETS> struct Unpacked {
    static constexpr int BITS = BITS_, PARTS = PARTS_;
    static constexpr bool HAS_SCALES = SCALES, HAS_OFFSETS = OFFSETS;

    static Quads weights(const uint8_t* from, int quad, int64_t output) {
        return load_quads(from + (quad * N_TILE + output) * 4);
    }
    static Vector scales(const uint8_t* block, int, int part, int64_t output) {
        return load(((const UnpackedBlock*)block)->scales[part] + output);
    }
    static Vector offsets(const uint8_t* block, int, int, int64_t output) {
        return load(((const UnpackedBlock*)block)->offsets + output);
    }
};

template <class Scheme>
static void unpack_block(const uint8_t* header, int block, const uint8_t* values, UnpackedBlock& to) {
    for (int64_t output = 0; output < N_TILE; output += LANES) {
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            Quads weights = Scheme::weights(values, quad, output);
            memcpy(to.values + (quad * N_TILE + output) * 4, &weights, sizeof(weights));
        }
        for (int part = 0; part < Scheme::PARTS; part++)
            if constexpr (Scheme::HAS_SCALES) store(to.scales[part] + output, Scheme::scales(header, block, part, output));
        if constexpr (Scheme::HAS_OFFSETS) store(to.offsets + output, Scheme::offsets(header, block, 0, output));
    }
}

/// How many quads' products fit into 16 bits: each adds two of a weight and an input of at most 127.
constexpr int quads_in_shorts(int bits) { return std::min(INT16_MAX / (2 * 127 * ((1 << bits) - 1)), QUADS); }

/// Sets `sums` to the products of a block, or of one of its halves.
template <class Scheme, int ROWS, int COUNT>
static inline void
sum_quads(const uint8_t* values, int64_t output, int part, const RoundedBlock* inputs, Integers (&sums)[ROWS][COUNT]) {
    constexpr int BITS = Scheme::BITS, PARTS = Scheme::PARTS;
    constexpr int IN_SHORTS = HAS_SHORTS ? std::min(quads_in_shorts(BITS), QUADS / PARTS) : 0;
    Quads shorts[ROWS][COUNT] = {};
    // From zeros, and not from what is to be taken away: a CPU clears a register by giving it another name.
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) sums[row][v] = Integers{};
#pragma GCC unroll 8
    for (int quad = part * (QUADS / PARTS); quad < (part + 1) * (QUADS / PARTS); quad++) {
        Quads weights[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) weights[v] = Scheme::weights(values, quad, output + v * LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            Quads input = splat_quad(inputs[row].values + quad * 4);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++)
                if constexpr (IN_SHORTS > 1) shorts[row][v] = add_products(weights[v], input, shorts[row][v]);
                else sums[row][v] = dot_quads<BITS>(weights[v], input, sums[row][v]);
        }
        if (IN_SHORTS < 2 || (quad + 1) % std::max(IN_SHORTS, 1)) continue;
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) {
                sums[row][v] += widened(shorts[row][v]);
                shorts[row][v] = Quads{};
            }
    }
}

/// Adds one block's products, times its scales, to the sums of some outputs and rows. These are not kept in registers,
/// where more outputs then have their whole numbers: each input is loaded less often.
template <class Scheme, int ROWS, int COUNT>
__attribute__((noinline)) static void add_block( // within its caller GCC has no registers for all whole numbers
    const uint8_t* header, int block, const uint8_t* values, int64_t output, const RoundedBlock* inputs,
    float (*__restrict sums)[N_TILE]
) {
    constexpr int32_t BIAS = shift_of(Scheme::BITS, Scheme::HAS_OFFSETS);
    Vector products[ROWS][COUNT];
#pragma GCC unroll 2
    for (int part = 0; part < Scheme::PARTS; part++) {
        Integers totals[ROWS][COUNT];
        sum_quads<Scheme>(values, output, part, inputs, totals);
        Vector scales[COUNT] = {}, offsets[COUNT] = {};
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            if constexpr (Scheme::HAS_SCALES) scales[v] = Scheme::scales(header, block, part, output + v * LANES);
            if constexpr (Scheme::HAS_OFFSETS) offsets[v] = Scheme::offsets(header, block, part, output + v * LANES);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const RoundedBlock& input = inputs[row];
            int32_t sum = Scheme::PARTS == 1 ? input.sum : part ? input.sum - input.first_sum : input.first_sum;
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) {
                Vector numbers = __builtin_convertvector(totals[row][v] - BIAS * sum, Vector), product = numbers;
                Vector before = part ? products[row][v] : Vector{};
                if constexpr (Scheme::HAS_OFFSETS) before = fused_exactly(offsets[v], splat(input.float_sum), before);
                if constexpr (Scheme::HAS_OFFSETS || Scheme::PARTS == 2) product = fused_exactly(numbers, scales[v], before);
                else if constexpr (Scheme::HAS_SCALES) product = numbers * scales[v];
                products[row][v] = product;
                if (part + 1 < Scheme::PARTS) continue;
                float* to = sums[row] + output + v * LANES;
                store(to, fused_exactly(product, splat(input.scale), load(to)));
            }
        }
    }
}

/// How many rows are multiplied with a panel at once, and how many of its vectors, so that whole numbers stay in registers.
constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 12 : 5;
constexpr int vectors_at_once(int rows) {
    for (int count = VECTORS_PER_TILE; count > 1; count /= 2)
        if ((rows + 2) * count + 2 <= REGISTERS) return count;
    return 1;
}

/// Whether it pays to unpack weights before many rows are multiplied with them: where few rows are at once, and it takes time.
template <class Scheme>
constexpr bool is_unpacked = REGISTERS == 16 && (Scheme::BITS == 5 || Scheme::BITS == 6 || Scheme::HAS_PRODUCTS);
constexpr int64_t MANY = 2 * ROWS_AT_ONCE; // rows, beyond which it does

/// A run of blocks of a panel, and whether the first rows are multiplied with it: these ask for what follows.
struct Piece {
    const uint8_t* from; // the first block's header
    int64_t blocks;
    Grouping grouping;
    bool is_first;

    /// Calls `use` with the header and the values of each block, its number, its number in the header, and what to ask for.
    template <bool HAS_SCALES, class Use> void each(Use use) const {
        int64_t of_header = grouping.header_blocks(), header_bytes = grouping.header_bytes();
        int64_t block_bytes = grouping.block_bytes(), step = block_bytes + header_bytes / of_header;
        const uint8_t *header = from, *values = header + header_bytes, *ahead = header + PREFETCH_BYTES;
        for (int64_t block = 0, in_header = 0; block < blocks; block++) {
            use(header, values, block, in_header, ahead, ahead + step);
            ahead += step;
            values += block_bytes;
            if (HAS_SCALES && ++in_header == of_header) {
                header = values;
                values += header_bytes;
                in_header = 0;
            }
        }
    }
};

template <class Scheme, int ROWS>
static inline void multiply_stored(const Piece& piece, const Rounded& inputs, float (*__restrict sums)[N_TILE]) {
    constexpr int COUNT = vectors_at_once(ROWS), PARTS = VECTORS_PER_TILE / COUNT;
    const uint8_t* asked = piece.from + PREFETCH_BYTES;
    auto multiply = [&](auto header, auto values, int64_t block, int64_t in_header, auto ahead, auto until) {
        for (int part = 0; part < PARTS; part++) {
            // Some before each part, and not unrolled: more at once would wait for each other, and products for them. They go to
            // the second cache: of types with bits in two places twice as many bytes come in the same time as in the nearest.
            const uint8_t* last = part + 1 < PARTS ? asked + (until - ahead) / PARTS : until;
            for (; piece.is_first && asked < last; asked += 64) __builtin_prefetch(asked, 0, 2);
            add_block<Scheme, ROWS, COUNT>(
                header, in_header, values, part * COUNT * LANES, inputs.from(0, block).all, sums
            );
        }
    };
    piece.each<Scheme::HAS_SCALES>(multiply);
}

template <class Scheme, int ROWS>
static inline void multiply_unpacked(
    const UnpackedBlock* blocks, int64_t count, const Rounded& inputs, float (*__restrict sums)[N_TILE]
) {
    constexpr int COUNT = vectors_at_once(ROWS);
    using AsUnpacked = Unpacked<Scheme::BITS, Scheme::PARTS, Scheme::HAS_SCALES, Scheme::HAS_OFFSETS>;
    for (int64_t block = 0; block < count; block++)
        for (int64_t output = 0; output < N_TILE; output += COUNT * LANES)
            add_block<AsUnpacked, ROWS, COUNT>(
                (const uint8_t*)(blocks + block), 0, blocks[block].values, output, inputs.from(0, block).all, sums
            );
}

/// Calls `multiply` with the number of rows, at most `ROWS_AT_ONCE`, as a constant.
template <int ROWS = ROWS_AT_ONCE, class Multiply> static inline void with_rows(int64_t rows, Multiply multiply) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return multiply(std::integral_constant<int, ROWS>());
        return with_rows<ROWS - 1>(rows, multiply);
    }
}

/// At most `M_BLOCK` rows times one panel, a piece after the other, each for all rows while it is near.
template <class Scheme>
static void multiply_in_pieces(
    const uint8_t* panel, const Grouping& grouping, const Rounded& inputs, int64_t rows, float (*sums)[N_TILE]
) {
    memset(sums, 0, rows * sizeof(*sums));
    bool are_unpacked = is_unpacked<Scheme> && rows > MANY;
    int64_t groups = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, of_header = grouping.header_blocks();
    int64_t blocks = std::max(K_BLOCK / BLOCK / of_header, int64_t(1)) * of_header;
    thread_local std::vector<UnpackedBlock> unpacked;
    for (int64_t block = 0; block < inputs.blocks; block += blocks) {
        Piece piece = {panel + grouping.bytes(block), std::min(blocks, inputs.blocks - block), grouping, true};
        if constexpr (is_unpacked<Scheme>)
            if (are_unpacked) {
                unpacked.resize(std::max(unpacked.size(), size_t(blocks)));
                piece.each<Scheme::HAS_SCALES>([&](auto header, auto values, int64_t at, int64_t in_header, auto ahead, auto until) {
                    for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
                    unpack_block<Scheme>(header, in_header, values, unpacked[at]);
                });
            }
        for (int64_t group = 0; group < groups; group++) {
            Span few(rows, group, groups);
            Rounded from = inputs.from(few.first, block);
            piece.is_first = group == 0;
            with_rows(few.last - few.first, [&](auto count) {
                constexpr int ROWS = decltype(count)::value;
                if constexpr (is_unpacked<Scheme>)
                    if (are_unpacked)
                        return multiply_unpacked<Scheme, ROWS>(unpacked.data(), piece.blocks, from, sums + few.first);
                multiply_stored<Scheme, ROWS>(piece, from, sums + few.first);
            });
        }
    }
}

using Kernel = void (*)(const uint8_t*, const Grouping&, const Rounded&, int64_t, float (*)[N_TILE]);
template <int BITS, int GROUPS, NumberKind SCALES, NumberKind OFFSETS = NONE>
static constexpr Kernel kernel = multiply_in_pieces<Stored<BITS, GROUPS, SCALES, OFFSETS>>;

/// The kernel for weights that are stored in a way; null where none are.
static Kernel kernel_of(const Grouping& grouping) {
    auto is = [&](int64_t bits, int64_t scales, int64_t offsets) {
        return grouping.bits == bits && grouping.scales == scales && grouping.offsets == offsets;
    };
    if (!grouping.group) return grouping.bits == 8 ? kernel<8, 0, FLOATS> : grouping.bits == 4 ? kernel<4, 0, FLOATS> : nullptr;
    if (grouping.group < BLOCK) return is(6, PRODUCTS, NONE) ? kernel<6, 2, PRODUCTS> : nullptr;
    if (is(8, HALVES, NONE)) return kernel<8, 1, HALVES>;
    if (is(5, HALVES, NONE)) return kernel<5, 1, HALVES>;
    if (is(5, HALVES, HALVES)) return kernel<5, 1, HALVES, HALVES>;
    if (is(5, PRODUCTS, PRODUCTS)) return kernel<5, 1, PRODUCTS, PRODUCTS>;
    if (is(4, HALVES, NONE)) return kernel<4, 1, HALVES>;
    if (is(4, HALVES, HALVES)) return kernel<4, 1, HALVES, HALVES>;
    if (is(4, HALVES, FLOATS)) return kernel<4, 1, HALVES, FLOATS>;
    if (is(4, FLOATS, NONE)) return kernel<4, 1, FLOATS>;
    if (is(4, FLOATS, FLOATS)) return kernel<4, 1, FLOATS, FLOATS>;
    if (is(4, PRODUCTS, PRODUCTS)) return kernel<4, 1, PRODUCTS, PRODUCTS>;
    return nullptr;
}

void multiply_integers(
    const uint8_t* panel, const Grouping& grouping, const Rounded& inputs, int64_t rows, float (*sums)[N_TILE]
) {
    kernel_of(grouping)(panel, grouping, inputs, rows, sums);
}

/// The instructions that products use, with spaces between them.
extern "C" const char* kernel_names() {
    return ""
#if defined(__AVX512F__)
           "avx512"
#elif defined(__AVX2__)
           "avx2"
#elif defined(__AVX__)
           "avx"
#elif defined(__aarch64__)
           "neon"
#elif defined(__SSE2__)
           "sse2"
#else
           "plain"
#endif
#if defined(__FMA__)
           " fma"
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
           " vnni"
#elif defined(__ARM_FEATURE_DOTPROD)
           " dotprod"
#endif
#if defined(__AVX512BF16__)
           " bf16"
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
           " amx"
#endif
        ;
}
