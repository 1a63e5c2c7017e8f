// What heads share that draw drafts token by token: the pass's outputs, and trees that grow by the likeliest node.
//
// Shape letters: B rows of a batch, K places of a draft, V vocabulary, X rank of a head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

/// What a pass said of the places of a draft, and how tokens are drawn from it.
struct Places {
    int64_t rows, places;      // B, K
    const float* logits;       // [B, K, V] before any correction
    const float* reads;        // [B, K - 1, X], what the states of the later places add to their memories; or null
    const float* temperatures; // [B]; 0 takes the likeliest token
    const double* noise;       // [B, K, V] as of the logits, or null; greedy rows have none
    const uint64_t* starts;    // [B, K], where the random numbers of positions begin, in place of all noise; or null
    const int64_t* ids;        // [V] of the tokens, for these numbers; null for 0, 1, …
};

constexpr int64_t INVALID = -2, ABSENT = -1; // tokens: of logits that are no numbers; of no node

/// The best token so far. What is not a number is larger than all numbers, and of equal ones the first counts.
struct Best {
    double score = -INFINITY;
    int64_t token = INT64_MAX;

    void take(double other, int64_t index) {
        if (std::isnan(score) || !(std::isnan(other) || other >= score)) return;
        if (other == score && index > token) return;
        score = other;
        token = index;
    }
};

/// A node that may be drafted.
struct Leaf {
    double value; // logarithm of the estimated probability of its path
    int64_t parent, place, token;
    int64_t number; // of the leaves that a row has had; of two with the same value the earlier one is taken

    bool operator<(const Leaf& other) const {
        return value != other.value ? value < other.value : number > other.number;
    }
};

/// One row's tree: its leaves as a heap, and the nodes that are drafted.
struct GrowingTree {
    std::vector<Leaf> leaves, taken;
    int64_t seen = 0;

    void push(double value, int64_t parent, int64_t place, int64_t token) {
        leaves.push_back({value, parent, place, token, seen++});
        std::push_heap(leaves.begin(), leaves.end());
    }

    /// Moves the best leaf to the nodes.
    const Leaf& take() {
        std::pop_heap(leaves.begin(), leaves.end());
        taken.push_back(leaves.back());
        leaves.pop_back();
        return taken.back();
    }

    /// Adds the best few tokens of a place after a node, -1 for the committed text.
    ///
    /// `scores` has room for a vector more; `ids` are their tokens, if these are not counted from 0.
    void add_best(
        float* scores, int64_t vocabulary, int64_t few, int64_t parent, int64_t place, const int64_t* ids = nullptr
    ) {
        double before = parent < 0 ? 0.0 : taken[parent].value;
        std::fill_n(scores + vocabulary, LANES, -INFINITY);
        Vector most = splat(-INFINITY), differs = {}; // from itself, as only what is no number does
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            Vector some = load(scores + i);
            most = some > most ? some : most;
            differs = some == some ? differs : splat(1.0f);
        }
        float top = largest(most);
        if (largest(differs) != 0.0f || !std::isfinite(top)) return push(before, parent, place, INVALID);
        Vector total = {};
        for (int64_t i = 0; i < vocabulary; i += LANES) total = total + exponential(load(scores + i) - top);
        double normalizer = top + std::log(double(sum(total)));
        std::vector<Best> best(few);
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            if (!(largest(load(scores + i)) > best.back().score)) continue;
            for (int64_t token = i; token < std::min(i + LANES, vocabulary); token++) {
                if (!(scores[token] > best.back().score)) continue;
                int64_t rank = few - 1;
                for (; rank && scores[token] > best[rank - 1].score; rank--) best[rank] = best[rank - 1];
                best[rank].score = scores[token];
                best[rank].token = token;
            }
        }
        for (const Best& found : best)
            if (found.score > -INFINITY)
                push(before + found.score - normalizer, parent, place, ids ? ids[found.token] : found.token);
    }
};
