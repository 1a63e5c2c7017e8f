// Products of a few rows with a matrix of weights, which is read once, in one stream.
#pragma once

#include <type_traits>
#include <vector>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "integers.h"
#include "tiles.h"

/// How many vectors of a panel are multiplied with a number of rows at once, so that all sums stay in registers.
constexpr int at_once(int rows) { return (rows + 1) * VECTORS_PER_TILE + 1 <= REGISTERS ? VECTORS_PER_TILE : 2; }

enum Kind { FLOAT32, BFLOAT16, INTEGERS };

/// Weights `[outputs, inputs]` in panels of `N_TILE` outputs, each `[inputs, N_TILE]`; the last is filled with zeros. In
/// bfloat16 those of two inputs stand side by side, `[inputs / 2, N_TILE, 2]`, and there is no odd input. Whole numbers are
/// in the order that `pack_panel` has for them.
struct Matrix {
    const void* panels;
    int64_t outputs, inputs;
    int64_t kind;        // a `Kind`
    const float* scales; // of the outputs of whole numbers that have one each, else null
    const float* bias;   // null if there is none
    Grouping grouping;   // of whole numbers

    int64_t count() const { return (outputs + N_TILE - 1) / N_TILE; }
};

/// How many inputs' weights of one output stand side by side.
template <class Weight> constexpr int64_t K_PACK = 1;
template <> constexpr int64_t K_PACK<BFloat16> = 2;

/// Adds `ROWS` rows times the weights of `K_PACK<Weight>` inputs to `totals`, the first input first.
template <int ROWS, int COUNT, class Weight>
static inline void
add_products(const float* inputs, int64_t stride, const Weight* weights, Vector (&totals)[ROWS][COUNT]) {
    Vector loaded[COUNT];
#pragma GCC unroll 8
    for (int v = 0; v < COUNT; v++) loaded[v] = load(weights + v * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) totals[row][v] = fused(splat(inputs[row * stride]), loaded[v], totals[row][v]);
}

template <int ROWS, int COUNT>
static inline void
add_products(const float* inputs, int64_t stride, const BFloat16* weights, Vector (&totals)[ROWS][COUNT]) {
#pragma GCC unroll 2
    for (int input = 0; input < 2; input++) {
        Vector loaded[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            Bits both = load_pairs(weights + v * 2 * LANES);
            loaded[v] = same_bits<Vector>(input ? both & 0xffff0000u : both << 16);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++)
                totals[row][v] = fused(splat(inputs[row * stride + input]), loaded[v], totals[row][v]);
    }
}

template <int ROWS, int COUNT>
static inline void
add_products(const BFloat16* inputs, int64_t stride, const BFloat16* weights, Vector (&totals)[ROWS][COUNT]) {
    Bits loaded[COUNT];
#pragma GCC unroll 8
    for (int v = 0; v < COUNT; v++) loaded[v] = load_pairs(weights + v * 2 * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) totals[row][v] = dot_bf16(splat(inputs + row * stride), loaded[v], totals[row][v]);
}

/// Adds `ROWS` rows times a piece of a panel to `sums`. Each sum runs over the inputs in their order, whatever `ROWS` is,
/// so that a row's result is the same to the last bit in every pass.
template <int ROWS, class Input, class Weight>
static inline void multiply_rows(
    const Input* __restrict inputs, int64_t stride, const Weight* __restrict panel, int64_t count,
    float (*__restrict sums)[N_TILE]
) {
    constexpr int COUNT = at_once(ROWS);
    constexpr int64_t STEP = K_PACK<Weight>;
    for (int part = 0; part < VECTORS_PER_TILE; part += COUNT) {
        Vector totals[ROWS][COUNT];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) totals[row][v] = load(sums[row] + (part + v) * LANES);
        for (int64_t k = 0; k < count; k += STEP) {
            const char* ahead = (const char*)(panel + k * N_TILE) + PREFETCH_BYTES;
#pragma GCC unroll 8
            for (size_t line = 0; line < STEP * N_TILE * sizeof(Weight); line += 64) __builtin_prefetch(ahead + line);
            add_products(inputs + k, stride, panel + k * N_TILE + part * LANES * STEP, totals);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) store(sums[row] + (part + v) * LANES, totals[row][v]);
    }
}

template <class Input, class Weight, int ROWS = M_REG>
static inline void multiply_few(
    int64_t rows, const Input* inputs, int64_t stride, const Weight* panel, int64_t count, float (*sums)[N_TILE]
) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return multiply_rows<ROWS>(inputs, stride, panel, count, sums);
        return multiply_few<Input, Weight, ROWS - 1>(rows, inputs, stride, panel, count, sums);
    }
}

/// At most `M_BLOCK` rows times one panel, a piece after the other, each for all rows while it is near.
template <class Input, class Weight>
static inline void multiply_group(
    const Weight* panel, int64_t count, const Input* inputs, int64_t rows, float (*sums)[N_TILE]
) {
    memset(sums, 0, rows * sizeof(*sums));
    int64_t blocks = (rows + M_REG - 1) / M_REG;
    for (int64_t k = 0; k < count; k += K_BLOCK)
        for (int64_t block = 0; block < blocks; block++) {
            Span few(rows, block, blocks);
            int64_t piece = count - k < K_BLOCK ? count - k : K_BLOCK;
            multiply_few(
                few.last - few.first, inputs + few.first * count + k, count, panel + k * N_TILE, piece, sums + few.first
            );
        }
}

#if defined(__AMX_BF16__) && defined(__linux__)
constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32; // of a tile of inputs; one of weights has as many inputs, and LANES outputs

/// Whether the system lets this process use tiles. It must be asked once, before the first.
static inline bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return may;
}

/// The shapes of all tiles: sums in 0 to 3, inputs in 4 and weights in 5, and those of the last inputs in 6 and 7.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes(int64_t count, int64_t rest) {
        for (int tile = 0; tile < 8; tile++) {
            bool is_last = tile > 5;
            rows[tile] = tile == 5 ? TILE_INPUTS / 2 : tile == 7 ? (rest ? rest / 2 : 1) : count;
            row_bytes[tile] = is_last && tile == 6 ? (rest ? rest * 2 : 4) : 64;
        }
    }
};

/// The rows and the last inputs for which this thread has set its tiles; 0 where it has not.
inline thread_local int64_t tiles_set = 0;

static inline void set_tiles(int64_t rows, int64_t rest) {
    if (tiles_set == rows * TILE_INPUTS + rest) return;
    TileShapes shapes(rows, rest);
    asm volatile("" ::"r"(&shapes) : "memory"); // the compiler does not see what is read
    _tile_loadconfig(&shapes);
    tiles_set = rows * TILE_INPUTS + rest;
}

/// To be called before other code runs, which may set tiles too, and while they are set takes longer to be interrupted.
static inline void release_tiles() {
    if (!tiles_set) return;
    _tile_release();
    tiles_set = 0;
}

/// Sums of a panel with the products of a few rows, in tiles: a row's are the same whatever rows stand beside it.
static inline void multiply_in_tiles(
    const BFloat16* panel, int64_t count, const BFloat16* inputs, int64_t rows, float (*sums)[N_TILE]
) {
    constexpr int64_t PAIRS = N_TILE * sizeof(BFloat16) * 2; // bytes of two inputs' weights
    static_assert(VECTORS_PER_TILE == 4 && LANES == 16);
    int64_t whole = count / TILE_INPUTS * TILE_INPUTS, stride = count * sizeof(BFloat16);
    for (int64_t first = 0; first < rows; first += TILE_ROWS) {
        int64_t few = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
        const BFloat16* from = inputs + first * count;
        set_tiles(few, count - whole);
        asm volatile("" ::"r"(from), "r"(panel) : "memory"); // the compiler does not see what is read
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < whole; k += TILE_INPUTS) {
            const BFloat16* weights = panel + k * N_TILE;
            _tile_loadd(4, from + k, stride);
            _tile_loadd(5, weights, PAIRS);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, weights + 2 * LANES, PAIRS);
            _tile_dpbf16ps(1, 4, 5);
            _tile_loadd(5, weights + 4 * LANES, PAIRS);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, weights + 6 * LANES, PAIRS);
            _tile_dpbf16ps(3, 4, 5);
        }
        if (whole < count) {
            const BFloat16* weights = panel + whole * N_TILE;
            _tile_loadd(6, from + whole, stride);
            _tile_loadd(7, weights, PAIRS);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, weights + 2 * LANES, PAIRS);
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, weights + 4 * LANES, PAIRS);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, weights + 6 * LANES, PAIRS);
            _tile_dpbf16ps(3, 6, 7);
        }
        float* to = sums[first];
        _tile_stored(0, to, sizeof(*sums));
        _tile_stored(1, to + LANES, sizeof(*sums));
        _tile_stored(2, to + 2 * LANES, sizeof(*sums));
        _tile_stored(3, to + 3 * LANES, sizeof(*sums));
    }
}
#else
static inline void release_tiles() {}
#endif

/// Where output 0 of a panel is, and how many there are.
struct Outputs {
    int64_t first, count;
    Outputs(const Matrix& matrix, int64_t panel)
        : first(panel * N_TILE), count(matrix.outputs - first < N_TILE ? matrix.outputs - first : N_TILE) {}
};

/// Scales the sums of some rows and one panel, adds the bias, and hands them to `done`.
template <class Done>
static inline void
finish(const Matrix& matrix, int64_t panel, int64_t first, int64_t count, float (*sums)[N_TILE], Done done) {
    Outputs outputs(matrix, panel);
    for (int64_t row = 0; row < count; row++) {
        for (int64_t i = 0; matrix.scales && i < outputs.count; i++) sums[row][i] *= matrix.scales[outputs.first + i];
        for (int64_t i = 0; matrix.bias && i < outputs.count; i++) sums[row][i] += matrix.bias[outputs.first + i];
        done(first + row, sums[row]);
    }
}

/// What is multiplied with a matrix: numbers `[rows, inputs]`, or rounded ones if its weights are whole numbers.
template <class Input> struct Operand {
    const Input* numbers;
    Rounded rounded;
};

/// The weights of one output as numbers (forward.cpp).
void copy_output(const Matrix& matrix, int64_t output, float* to);

/// A panel of whole numbers, as one of float32; valid until the thread's next call.
static inline const float* unpacked_panel(const Matrix& matrix, int64_t panel) {
    thread_local std::vector<float> weights, one;
    weights.assign(matrix.inputs * N_TILE, 0.0f);
    one.resize(matrix.inputs);
    Outputs outputs(matrix, panel);
    for (int64_t i = 0; i < outputs.count; i++) {
        copy_output(matrix, outputs.first + i, one.data());
        for (int64_t k = 0; k < matrix.inputs; k++) weights[k * N_TILE + i] = one[k];
    }
    return weights.data();
}

/// The product of `multiply` with weights that are whole numbers, and inputs that are not rounded: slow, for comparison.
template <class Done>
static inline void multiply_exactly(const Matrix& matrix, int64_t panel, const float* inputs, int64_t rows, Done done) {
    alignas(64) float sums[M_BLOCK][N_TILE];
    const float* weights = unpacked_panel(matrix, panel);
    Matrix scaled = matrix; // the weights have their scales already
    scaled.scales = nullptr;
    for (int64_t first = 0; first < rows; first += M_BLOCK) {
        int64_t count = rows - first < M_BLOCK ? rows - first : M_BLOCK;
        multiply_group(weights, matrix.inputs, inputs + first * matrix.inputs, count, sums);
        finish(scaled, panel, first, count, sums, done);
    }
}

/// `rows` rows of `inputs` times one panel of a matrix, bias included; `done(row, sums)` takes each row's `N_TILE` sums.
/// Inputs are float, or bfloat16 where `HAS_DOTS` and the matrix is.
template <class Input, class Done>
static inline void multiply(const Matrix& matrix, int64_t panel, const Operand<Input>& inputs, int64_t rows, Done done) {
    if constexpr (std::is_same_v<Input, float>)
        if (matrix.kind == INTEGERS && !inputs.rounded.all)
            return multiply_exactly(matrix, panel, inputs.numbers, rows, done);
    alignas(64) float sums[M_BLOCK][N_TILE];
    int64_t offset = panel * N_TILE * matrix.inputs;
    for (int64_t first = 0; first < rows; first += M_BLOCK) {
        int64_t count = rows - first < M_BLOCK ? rows - first : M_BLOCK;
        if (matrix.kind == INTEGERS) {
            const Grouping& grouping = matrix.grouping;
            const uint8_t* bytes = (const uint8_t*)matrix.panels + panel * grouping.bytes(blocks_of(matrix.inputs));
            multiply_integers(bytes, grouping, inputs.rounded.from(first, 0), count, sums);
            finish(matrix, panel, first, count, sums, done);
            continue;
        }
        const Input* from = inputs.numbers + first * matrix.inputs;
#if defined(__AMX_BF16__) && defined(__linux__)
        if constexpr (std::is_same_v<Input, BFloat16>)
            if (may_use_tiles()) {
                multiply_in_tiles((const BFloat16*)matrix.panels + offset, matrix.inputs, from, count, sums);
                finish(matrix, panel, first, count, sums, done);
                continue;
            }
#endif
        if (matrix.kind == BFLOAT16)
            multiply_group((const BFloat16*)matrix.panels + offset, matrix.inputs, from, count, sums);
        else if constexpr (std::is_same_v<Input, float>)
            multiply_group((const float*)matrix.panels + offset, matrix.inputs, from, count, sums);
        finish(matrix, panel, first, count, sums, done);
    }
}

/// The same of a matrix whose weights are numbers.
template <class Input, class Done>
static inline void multiply(const Matrix& matrix, int64_t panel, const Input* inputs, int64_t rows, Done done) {
    multiply(matrix, panel, Operand<Input>{inputs, {}}, rows, done);
}

template <class Weight> static void pack(const Weight* weights, int64_t outputs, int64_t inputs, Weight* panels) {
    constexpr int64_t STEP = K_PACK<Weight>;
    int64_t count = (outputs + N_TILE - 1) / N_TILE;
#pragma omp parallel for
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t i = 0; i < N_TILE; i++) {
            int64_t output = panel * N_TILE + i;
            Weight* to = panels + panel * N_TILE * inputs + i * STEP;
            for (int64_t k = 0; k < inputs; k++)
                to[k / STEP * STEP * N_TILE + k % STEP] = output < outputs ? weights[output * inputs + k] : Weight{};
        }
}
