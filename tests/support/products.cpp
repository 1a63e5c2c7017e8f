// Multiplies what it reads from the standard input, for CPUs that are emulated: what the tests do through ctypes elsewhere.
#include <cstdio>
#include <vector>

#include "integers.h"
#include "gemm.h"

extern "C" {
int64_t packed_bytes(const Matrix* matrix);
void pack_matrix(const Matrix* matrix, const void* weights, void* panels);
void pack_integers(const Matrix* matrix, const Weights* from, uint8_t* panels);
int64_t multiply_all(const Matrix*, const void* inputs, int64_t are_bfloat16, int64_t rows, float* outputs, int64_t threads);
}

template <class T> static std::vector<T> read(int64_t count) {
    std::vector<T> found(count);
    if (fread(found.data(), sizeof(T), count, stdin) != (size_t)count) throw 1;
    return found;
}

int main() {
    while (true) {
        int64_t sizes[8]; // outputs, inputs, rows, bytes of weights, bits, group, scales, offsets
        if (fread(sizes, sizeof(int64_t), 8, stdin) != 8) return 0;
        Matrix matrix = {};
        matrix.outputs = sizes[0];
        matrix.inputs = sizes[1];
        matrix.kind = sizes[3] == 4 ? FLOAT32 : sizes[3] == 2 ? BFLOAT16 : INTEGERS;
        matrix.grouping = {sizes[4], sizes[5], sizes[6], sizes[7]};
        auto weights = read<uint8_t>(matrix.outputs * matrix.inputs * sizes[3]);
        // As `_Weights` has them: scales, the numbers of these if they are products, and the same of offsets.
        std::vector<uint8_t> parts[4];
        const Grouping& grouping = matrix.grouping;
        int64_t groups = groups_of(grouping, matrix.inputs), numbers = std::max<int64_t>(numbers_of(grouping, matrix.inputs), 1);
        for (int which = 0; matrix.kind == INTEGERS && which < 2; which++) {
            int64_t kind = which ? grouping.offsets : grouping.scales;
            parts[which] = read<uint8_t>(matrix.outputs * numbers * (grouping.group ? Grouping::size_of(kind) : which ? 0 : 4));
            parts[2 + which] = read<uint8_t>(kind == PRODUCTS ? matrix.outputs * groups : 0);
        }
        auto inputs = read<float>(sizes[2] * matrix.inputs);
        std::vector<uint8_t> panels(packed_bytes(&matrix));
        Weights from = {(int8_t*)weights.data(), parts[0].data(), parts[1].data(), (int8_t*)parts[2].data(), (int8_t*)parts[3].data()};
        if (matrix.kind == INTEGERS) pack_integers(&matrix, &from, panels.data());
        else pack_matrix(&matrix, weights.data(), panels.data());
        matrix.panels = panels.data();
        if (matrix.kind == INTEGERS && !groups) matrix.scales = (const float*)parts[0].data();
        std::vector<float> outputs(sizes[2] * matrix.outputs);
        multiply_all(&matrix, inputs.data(), 0, sizes[2], outputs.data(), 2);
        fwrite(outputs.data(), sizeof(float), outputs.size(), stdout);
    }
}
