// How matrices are cut, and the work on them.
#pragma once

#include "simd.h"

constexpr int VECTORS_PER_TILE = 4;                 // vectors of a panel
constexpr int M_REG = 6;              // rows that are multiplied with a panel at once
constexpr int64_t N_TILE = VECTORS_PER_TILE * LANES; // outputs of a panel

constexpr int64_t M_BLOCK = (REGISTERS == 16 ? 8 : 4) * M_REG;  // rows between which a piece of a panel stays in the nearest cache
constexpr int64_t K_BLOCK = 128;          // inputs of such a piece
constexpr int64_t PREFETCH_BYTES = 16384;        // bytes that are asked for before they are read, beyond what CPUs do by themselves

/// The things `first` to `last` of `count` that one of several, such as a thread, has.
struct Span {
    int64_t first, last;
    Span(int64_t count, int64_t which, int64_t of)
        : first(count * which / of), last(count * (which + 1) / of) {}
};
