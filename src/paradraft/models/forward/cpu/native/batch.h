// The new tokens of a pass, and what each of them sees.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Batch {
    int64_t rows, tokens, wanted, slots; // B, N, R and the slots of a row's cache
    const int64_t *ids, *parents;        // [B, N]; ids below 0: absent; parents -1: the last token kept, or BLOCK
    const int64_t *lengths, *places;     // [B] tokens kept; [B, R] whose logits are wanted, -1 for none
    void* const* keys;                   // of each layer [B, slots, kv_heads, head_size]
    void* const* values;
    float* logits; // [B, R, outputs of the head]; 0 where the token is absent
    const float* vectors; // [B, N, hidden_size] in place of embeddings; null if there are none
    // Where states [B, N, hidden_size] go: the embeddings, the output of each layer, and that of the final norm; null where
    // a layer's are not wanted, and null as a whole where none are.
    float* const* states;
};

constexpr int64_t BLOCK_OF_ALL = -2; // in place of a parent: see `BLOCK` in parents.py

/// How many slots a row has kept, which all its tokens see; the new ones are written after.
inline int64_t kept_of(const Batch& batch, int64_t row) { return std::min(batch.lengths[row], batch.slots - 1); }

/// Where a new token, or its position, is. A row that has ended is read on with the others; past the room
/// its tokens take the last slot, which no other token sees.
inline int64_t within(const Batch& batch, int64_t row, int64_t place) {
    return std::min(kept_of(batch, row) + place, batch.slots - 1);
}

/// For each token its depth, and the slots of the new tokens that it sees: its ancestors and itself, or all of its block.
struct Seen {
    int64_t *depths, *counts; // [C]
    int32_t* slots;           // [C, N]
};

/// `places` are those of the C tokens in [B, N], `numbers` says which token is at each place; -1 for none.
inline void find(const Batch& batch, const std::vector<int64_t>& places, const std::vector<int64_t>& numbers, const Seen& seen) {
    for (size_t token = 0; token < places.size(); token++) {
        int64_t row = places[token] / batch.tokens, first = row * batch.tokens, self = places[token] - first;
        int64_t depth = 0, count = 0;
        const int64_t* parents = batch.parents + first;
        int32_t* slots = seen.slots + token * batch.tokens;
        if (parents[self] == BLOCK_OF_ALL) {
            for (int64_t other = 0; other < batch.tokens; other++) {
                if (parents[other] != BLOCK_OF_ALL || numbers[first + other] < 0) continue;
                depth += other < self;
                slots[count++] = within(batch, row, other);
            }
        } else {
            for (int64_t up = parents[self]; up >= 0; up = parents[up]) depth++;
            for (int64_t up = self, at = depth; up >= 0; up = parents[up]) slots[at--] = within(batch, row, up);
            count = depth + 1;
        }
        seen.depths[token] = depth;
        seen.counts[token] = count;
    }
}
