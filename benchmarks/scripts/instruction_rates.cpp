// How many billion instructions of 512 bits a core runs in a second, of those that bound products; and of two kinds together.
//
//     mkdir -p build && g++ -O2 -march=native benchmarks/scripts/instruction_rates.cpp -o build/rates && build/rates
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

constexpr long ROUNDS = 2'000'000;

/// Runs `run` several times; each is `instructions` instructions, `ROUNDS` times.
template <class Run> static double billions_per_s(int instructions, Run run) {
    double best = 1e9;
    for (int attempt = 0; attempt < 7; attempt++) {
        auto begun = std::chrono::steady_clock::now();
        run();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
    }
    return instructions * double(ROUNDS) / best / 1e9;
}

// Sums are in registers all the time, and independent of each other: more than an instruction takes cycles.
#define RATE(ASSEMBLER)                                                                                      \
    billions_per_s(24, [] {                                                                                  \
        __m512i sums[24] = {}, left = _mm512_set1_epi8(3), right = _mm512_set1_epi8(5);                      \
        for (long round = 0; round < ROUNDS; round++) {                                                      \
            _Pragma("GCC unroll 24") for (int i = 0; i < 24; i++)                                            \
                asm volatile(ASSEMBLER : "+v"(sums[i]) : "v"(left), "v"(right));                             \
        }                                                                                                    \
    })

static double rate_of_both() {
    return billions_per_s(24, [] {
        __m512i sums[24] = {}, left = _mm512_set1_epi8(3), right = _mm512_set1_epi8(5);
        for (long round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 24
            for (int i = 0; i < 24; i++)
                if (i % 3 < 2) asm volatile("vpdpbusd %1,%2,%0" : "+v"(sums[i]) : "v"(left), "v"(right));
                else asm volatile("vfmadd231ps %1,%2,%0" : "+v"(sums[i]) : "v"(left), "v"(right));
        }
    });
}

int main() {
    printf("{\n");
    printf(" \"vpdpbusd\": %.2f,\n", RATE("vpdpbusd %1,%2,%0"));
    printf(" \"vdpbf16ps\": %.2f,\n", RATE("vdpbf16ps %1,%2,%0"));
    printf(" \"vfmadd231ps\": %.2f,\n", RATE("vfmadd231ps %1,%2,%0"));
    printf(" \"vpmaddubsw\": %.2f,\n", RATE("vpmaddubsw %1,%2,%0"));
    printf(" \"two vpdpbusd for each vfmadd231ps\": %.2f\n}\n", rate_of_both());
}
