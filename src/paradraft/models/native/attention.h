// Norms, rotary positions and attention over a cache, token by token.
#pragma once

#include "vectors.h"

/// Root-mean-square norm (Zhang & Sennrich 2019).
static inline void normalize(const float* from, const float* weights, int64_t size, float epsilon, float* to) {
    Vector squares = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += load(from + i) * load(from + i);
    float total = sum(squares);
    for (int64_t i = whole; i < size; i++) total += from[i] * from[i];
    float scale = 1.0f / std::sqrt(total / size + epsilon);
    for (int64_t i = 0; i < size; i++) to[i] = weights[i] * (from[i] * scale);
}

/// Turns a head's halves against each other by its position's angles (Su et al. 2021, in the order of `transformers`).
static inline void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float lower = head[i], upper = head[i + half];
        head[i] = lower * cosines[i] - upper * sines[i];
        head[i + half] = upper * cosines[i] + lower * sines[i];
    }
}

template <class Stored> static inline float dot(const float* query, const Stored* key, int64_t size) {
    Vector products = {};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) products += load(query + i) * load(key + i);
    float total = sum(products);
    for (int64_t i = whole; i < size; i++) total += query[i] * number(key[i]);
    return total;
}

/// Attention of one query over the slots that it sees, in the order in which they are given.
///
/// What comes out depends on what stands in these slots and not on where they are, so that a token has the same
/// result to the last bit as part of a tree and behind its ancestors alone.
///
/// `keys` and `values` are those of one head and row, `stride` apart; `scores` has room for `count` and `LANES` more.
template <class Stored>
static inline void attend(
    const float* query, const Stored* keys, const Stored* values, int64_t stride, const int32_t* slots, int64_t count,
    int64_t size, float scale, float* scores, float* to
) {
    float highest = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        scores[i] = scale * dot(query, keys + slots[i] * stride, size);
        highest = scores[i] > highest ? scores[i] : highest;
    }
    for (int64_t i = count; i < count + LANES; i++) scores[i] = -INFINITY;
    Vector totals = {};
    for (int64_t i = 0; i < count; i += LANES) {
        Vector weights = exponential(load(scores + i) - highest);
        store(scores + i, weights);
        totals += weights;
    }
    float share = 1.0f / sum(totals);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        Vector mixed[4] = {};
        for (int64_t slot = 0; slot < count; slot++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                mixed[v] += scores[slot] * load(values + slots[slot] * stride + i + v * LANES);
        for (int v = 0; v < 4; v++) store(to + i + v * LANES, mixed[v] * share);
    }
    for (; i + LANES <= size; i += LANES) {
        Vector mixed = {};
        for (int64_t slot = 0; slot < count; slot++) mixed += scores[slot] * load(values + slots[slot] * stride + i);
        store(to + i, mixed * share);
    }
    for (; i < size; i++) {
        float mixed = 0;
        for (int64_t slot = 0; slot < count; slot++) mixed += scores[slot] * number(values[slots[slot] * stride + i]);
        to[i] = mixed * share;
    }
}
