// The random numbers of sampling/noise.py, of single tokens: pure functions of seed, position and token.
#pragma once

#include <cmath>
#include <cstdint>

constexpr double MOST_NOISE = 36.75;             // of the largest uniform number, 1 - 2^-53
constexpr double LEAST_NOISE = -3.62;            // of the smallest, 2^-53
constexpr double NEAR = 1e-9;                    // scores that are no further apart may be in either order
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u; // SplitMix64

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/// The noise of the upper 52 bits of a word.
static inline double noise_of(uint64_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-52)); }

/// Bits below this have less noise than `noise`; 2^52 if all have.
static uint64_t fewest_bits(double noise) {
    if (!(noise >= LEAST_NOISE)) return 0; // what is no number, too
    if (noise > MOST_NOISE) return uint64_t(1) << 52;
    double bits = std::exp(-std::exp(-noise)) * (1 - 1e-12) * 0x1p52 - 4; // never too many, however it is rounded
    return bits < 0 ? 0 : uint64_t(bits);
}

/// The bits of the noise of a token, at a position whose numbers begin at a word.
static inline uint64_t bits_of(uint64_t start, int64_t token) { return mixed(start + uint64_t(token + 1) * GOLDEN) >> 12; }
