// Norms, rotary positions and attention over a cache, token by token.
#pragma once

#include <algorithm>

#include "simd.h"

/// Root-mean-square norm (Zhang & Sennrich 2019).
template <class Input>
static inline void rms_norm(const float* from, const float* weights, int64_t size, float epsilon, Input* to) {
    Vector squares = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares = fused(load(from + i), load(from + i), squares);
    float total = sum(squares);
    for (int64_t i = whole; i < size; i++) total += from[i] * from[i];
    float scale = 1.0f / std::sqrt(total / size + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(weights + i) * (load(from + i) * scale));
    for (int64_t i = whole; i < size; i++) to[i] = stored<Input>(weights[i] * (from[i] * scale));
}

/// Turns a head's halves against each other by its position's angles (Su et al. 2021, in the order of `transformers`).
static inline void apply_rope(float* head, const float* cosines, const float* sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float lower = head[i], upper = head[i + half];
        head[i] = lower * cosines[i] - upper * sines[i];
        head[i + half] = upper * cosines[i] + lower * sines[i];
    }
}

constexpr int Q_TILE = REGISTERS / 5; // queries for which a key is read once
constexpr int64_t SLOTS = 4;           // keys that are read at once
constexpr int64_t PREFETCH_SLOTS = 16;           // slots that are asked for before they are read: a head's lie apart

/// Asks for the keys or values of one slot and head.
template <class Stored> static inline void prefetch(const Stored* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(Stored)) __builtin_prefetch(from + i);
}

/// A query, and what it sees after the slots that all queries of its row see.
template <class Input> struct Query {
    const float* at;
    const int32_t* slots; // its ancestors among the new tokens, from the first one down to itself
    int64_t count;
    float* scores; // room for all that it sees, as many more as there are new tokens, and two vectors
    Input* to;
};

/// Products of `QUERIES` queries with `SLOTS` keys, which go to place `at` of each query's scores.
template <int QUERIES, class Stored, class Input>
static inline void
dot_keys(const Query<Input>* queries, const Stored* const (&keys)[SLOTS], int64_t at, int64_t size) {
    Vector products[QUERIES][SLOTS] = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
#pragma GCC unroll 8
        for (int s = 0; s < SLOTS; s++) {
            Vector key = load(keys[s] + i);
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; q++) products[q][s] = fused(load(queries[q].at + i), key, products[q][s]);
        }
#pragma GCC unroll 8
    for (int q = 0; q + 1 < QUERIES; q += 2)
        sum_eight(products[q], products[q + 1], queries[q].scores + at, queries[q + 1].scores + at);
    if (QUERIES % 2) sum_four(products[QUERIES - 1], queries[QUERIES - 1].scores + at);
    for (int64_t i = whole; i < size; i++)
        for (int q = 0; q < QUERIES; q++)
            for (int s = 0; s < SLOTS; s++) queries[q].scores[at + s] += queries[q].at[i] * number(keys[s][i]);
}

/// Products of `QUERIES` queries with any number of keys; `key(i)` is the i-th, `at + i` its place.
template <int QUERIES, class Input, class Key>
static inline void score_all(const Query<Input>* queries, int64_t count, Key key, int64_t at, int64_t size) {
    for (int64_t i = 0; i < count; i += SLOTS) {
        // Behind the last one it is read again, and its result is written past the end and not read.
        auto at_most = [&](int64_t which) { return key(which < count ? which : count - 1); };
        const decltype(key(0)) keys[SLOTS] = {key(i), at_most(i + 1), at_most(i + 2), at_most(i + 3)};
        for (int64_t s = 0; s < SLOTS; s++) prefetch(at_most(i + PREFETCH_SLOTS + s), size);
        dot_keys<QUERIES>(queries, keys, at + i, size);
    }
}

/// Turns the products of `QUERIES` queries into weights that add up to 1, but for the factors that go to `shares`.
///
/// The queries go on together as far as the one that sees most; what is after a query's own end adds nothing.
template <int QUERIES, class Input>
static inline void softmax(const Query<Input>* queries, int64_t kept, float scale, float* shares) {
    Vector highest[QUERIES], totals[QUERIES] = {};
    int64_t most = 0;
    for (int q = 0; q < QUERIES; q++) {
        highest[q] = splat(-INFINITY);
        most = kept + queries[q].count > most ? kept + queries[q].count : most;
    }
    for (int q = 0; q < QUERIES; q++)
        for (int64_t i = kept + queries[q].count; i < most + LANES; i += LANES)
            store(queries[q].scores + i, splat(-INFINITY));
    for (int64_t i = 0; i < most; i += LANES)
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; q++) {
            Vector some = load(queries[q].scores + i);
            highest[q] = some > highest[q] ? some : highest[q];
        }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) highest[q] = splat(largest(highest[q]));
    for (int64_t i = 0; i < most; i += LANES)
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; q++) {
            Vector weights = exponential((load(queries[q].scores + i) - highest[q]) * scale);
            store(queries[q].scores + i, weights);
            totals[q] += weights;
        }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) shares[q] = 1.0f / sum(totals[q]);
}

/// The weighted values of `QUERIES` queries, `VECTORS` vectors of them.
template <int QUERIES, int VECTORS, class Stored, class Input>
static inline void weighted_values(
    const Query<Input>* queries, const float* shares, const Stored* values, int64_t stride, int64_t kept, int64_t offset
) {
    Vector mixed[QUERIES][VECTORS] = {};
    for (int64_t slot = 0; slot < kept; slot++) {
        prefetch(values + (slot + PREFETCH_SLOTS) * stride + offset, VECTORS * LANES);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            Vector value = load(values + slot * stride + offset + v * LANES);
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; q++) mixed[q][v] = fused(splat(queries[q].scores[slot]), value, mixed[q][v]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) {
        for (int64_t i = 0; i < queries[q].count; i++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                mixed[q][v] = fused(
                    splat(queries[q].scores[kept + i]), load(values + queries[q].slots[i] * stride + offset + v * LANES),
                    mixed[q][v]
                );
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(queries[q].to + offset + v * LANES, mixed[q][v] * shares[q]);
    }
}

/// Counts the new slots right after the kept ones that all queries see among those, so that they are read once for all.
/// Returns how many slots are kept then; the queries have the others.
template <class Input> static inline int64_t with_shared(int64_t count, Query<Input>* queries, int64_t kept) {
    int64_t shared = queries[0].count;
    for (int64_t q = 1; q < count; q++) shared = std::min(shared, queries[q].count);
    // Slots rise along a path: where one is as far after the first as it is deep, so are all before it.
    for (int64_t q = 0; q < count; q++)
        while (shared && queries[q].slots[shared - 1] != kept + shared - 1) shared--;
    for (int64_t q = 0; q < count; q++) {
        queries[q].slots += shared;
        queries[q].count -= shared;
    }
    return kept + shared;
}

/// Attention of `QUERIES` queries of one row over the first `kept` slots, which all of them see, and their own.
///
/// What comes out depends on what stands in the slots that a query sees and on their order, and not on where they are
/// nor on the other queries, so that a token has the same result to the last bit as part of a tree and after its
/// ancestors alone.
///
/// `keys` and `values` are those of one row and head, `stride` apart.
template <int QUERIES, class Stored, class Input>
static inline void attend_together(
    Query<Input>* queries, const Stored* keys, const Stored* values, int64_t stride, int64_t kept, int64_t size, float scale
) {
    kept = with_shared(QUERIES, queries, kept);
    score_all<QUERIES>(queries, kept, [&](int64_t slot) { return keys + slot * stride; }, 0, size);
    for (int q = 0; q < QUERIES; q++) {
        const Query<Input>& query = queries[q];
        score_all<1>(&query, query.count, [&](int64_t i) { return keys + query.slots[i] * stride; }, kept, size);
    }
    float shares[QUERIES];
    softmax<QUERIES>(queries, kept, scale, shares);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) weighted_values<QUERIES, 4>(queries, shares, values, stride, kept, i);
    for (; i + LANES <= size; i += LANES) weighted_values<QUERIES, 1>(queries, shares, values, stride, kept, i);
    for (; i < size; i++)
        for (int q = 0; q < QUERIES; q++) {
            float mixed = 0;
            for (int64_t slot = 0; slot < kept; slot++)
                mixed += queries[q].scores[slot] * number(values[slot * stride + i]);
            for (int64_t own = 0; own < queries[q].count; own++)
                mixed += queries[q].scores[kept + own] * number(values[queries[q].slots[own] * stride + i]);
            queries[q].to[i] = stored<Input>(mixed * shares[q]);
        }
}

/// The same for as many queries as there are, at most `Q_TILE`.
template <class Stored, class Input, int QUERIES = Q_TILE>
static inline void attend(
    int64_t count, Query<Input>* queries, const Stored* keys, const Stored* values, int64_t stride, int64_t kept,
    int64_t size, float scale
) {
    if constexpr (QUERIES > 0) {
        if (count == QUERIES) return attend_together<QUERIES>(queries, keys, values, stride, kept, size, scale);
        return attend<Stored, Input, QUERIES - 1>(count, queries, keys, values, stride, kept, size, scale);
    }
}
