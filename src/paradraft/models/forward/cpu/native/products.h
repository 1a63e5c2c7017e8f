// Products of all rows of a pass, shared by a team.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "team.h"

template <class T, class As = T> static As* grown(std::vector<T>& buffer, int64_t size) {
    if ((int64_t)buffer.size() < size) buffer.resize(size);
    return (As*)buffer.data();
}

constexpr int64_t BLOCKS_AT_ONCE = 128; // that are rounded in less time than it takes to share them out

/// Where the inputs of a product are rounded.
struct Rounding {
    std::vector<RoundedBlock> all;
    bool is_off = false; // for an exact pass

    /// What `matrix` is multiplied with; rounded if it needs that, and valid until the next call then.
    template <class Input> Operand<Input> of(Team& team, const Matrix& matrix, const Input* inputs, int64_t rows) {
        Operand<Input> operand = {inputs, {}};
        if constexpr (std::is_same_v<Input, float>)
            if (matrix.kind == INTEGERS && !is_off) {
                int64_t blocks = blocks_of(matrix.inputs), count = rows * blocks;
                RoundedBlock* to = grown(all, count);
                team.each(count, BLOCKS_AT_ONCE, [&](Span share, int) {
                    for (int64_t at = share.first; at < share.last; at++) {
                        int64_t first = at / rows * BLOCK, left = matrix.inputs - first;
                        round_block(inputs + at % rows * matrix.inputs + first, std::min(left, BLOCK), to[at]);
                    }
                });
                operand.rounded = {to, rows, blocks};
            }
        return operand;
    }
};

/// Hands each row's products to `put`, by row and panel.
template <class Input, class Put>
static void each_product(Team& team, const Matrix& matrix, const Operand<Input>& inputs, int64_t rows, const Put& put) {
    team.each(matrix.count(), 1, [&](Span panels, int) {
        for (; panels.first < panels.last; panels.first++) {
            Outputs outputs(matrix, panels.first);
            multiply(matrix, panels.first, inputs, rows, [&](int64_t row, const float* sums) { put(row, outputs, sums); });
        }
    });
}

/// Products go to the rows of `to`, which have `stride` numbers, in their order, or to those that `places` names.
template <class Input>
static void set_product(
    Team& team, const Matrix& matrix, const Operand<Input>& inputs, int64_t rows, float* to, int64_t stride,
    const int64_t* places = nullptr
) {
    each_product(team, matrix, inputs, rows, [&](int64_t row, const Outputs& outputs, const float* sums) {
        std::copy_n(sums, outputs.count, to + (places ? places[row] : row) * stride + outputs.first);
    });
}

/// Products are added to the rows of `to`, as in `set_product`.
template <class Input>
static void add_product(
    Team& team, const Matrix& matrix, const Operand<Input>& inputs, int64_t rows, float* to, int64_t stride,
    const int64_t* places = nullptr
) {
    each_product(team, matrix, inputs, rows, [&](int64_t row, const Outputs& outputs, const float* sums) {
        float* added = to + (places ? places[row] : row) * stride + outputs.first;
        for (int64_t i = 0; i < outputs.count; i++) added[i] += sums[i];
    });
}
