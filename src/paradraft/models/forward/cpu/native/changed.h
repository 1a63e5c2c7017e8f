// Rows of a pass whose projections differ by a product of low rank: those of some of the added ids. Other rows are what they
// are without it, to the last bit.
#pragma once

#include <algorithm>
#include <vector>

#include "products.h"

/// What is added to a product with `inputs`: `up` times `down` times them. Without outputs of `down` it is nothing.
struct LowRank {
    Matrix down, up;
};

struct LayerChange {
    LowRank qkv, output;
};

/// How the projections of attention differ for some of the added ids, `first` to `last` - 1.
struct Change {
    int64_t first, last;
    const LayerChange* layer;
};

/// The rows that a change concerns, by number.
struct ChangedRows {
    const LayerChange* layer;
    std::vector<int64_t> numbers;
};

/// What changes concern in a pass: by change the rows of all tokens, and those of the tokens of the last layer.
struct Changed {
    std::vector<ChangedRows> all, last;
    std::vector<float> inputs, ranks;

    /// `places` says where in `ids` each token is, `all_tokens` and `last_tokens` which tokens the rows are.
    void find(
        const Change* changes, int64_t count, const int64_t* ids, const std::vector<int64_t>& places,
        const std::vector<int64_t>& all_tokens, const std::vector<int64_t>& last_tokens
    ) {
        all.clear();
        last.clear();
        for (const Change* change = changes; change < changes + count; change++) {
            auto add_rows = [&](std::vector<ChangedRows>& to, const std::vector<int64_t>& tokens) {
                ChangedRows rows = {change->layer, {}};
                for (size_t row = 0; row < tokens.size(); row++) {
                    int64_t id = ids[places[tokens[row]]];
                    if (change->first <= id && id < change->last) rows.numbers.push_back(row);
                }
                if (!rows.numbers.empty()) to.push_back(rows);
            };
            add_rows(all, all_tokens);
            add_rows(last, last_tokens);
        }
    }

    /// Adds what a change makes of the inputs of its rows to the rows of `to`, which have `stride` numbers.
    template <class Input>
    void add(
        Team& team, Rounding& rounding, const LowRank& change, const ChangedRows& rows, const Input* from, float* to,
        int64_t stride
    ) {
        int64_t count = rows.numbers.size(), width = change.down.inputs, rank = change.down.outputs;
        if (!rank) return;
        Input* chosen = grown<float, Input>(inputs, count * width);
        float* between = grown(ranks, count * rank);
        for (int64_t at = 0; at < count; at++) std::copy_n(from + rows.numbers[at] * width, width, chosen + at * width);
        set_product(team, change.down, rounding.of(team, change.down, (const Input*)chosen, count), count, between, rank);
        Operand<float> operand = rounding.of(team, change.up, (const float*)between, count);
        add_product(team, change.up, operand, count, to, stride, rows.numbers.data());
    }
};
