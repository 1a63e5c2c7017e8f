// Multiplies what it reads from the standard input, for CPUs that are emulated: what the tests do through ctypes elsewhere.
#include <cstdio>
#include <vector>

#include "integers.h"
#include "gemm.h"

extern "C" {
int64_t packed_bytes(const Matrix* matrix);
void pack_matrix(const Matrix* matrix, const void* weights, const void* scales, const float* offsets, void* panels);
int64_t multiply_all(const Matrix*, const void* inputs, int64_t are_bfloat16, int64_t rows, float* outputs, int64_t threads);
}

template <class T> static std::vector<T> read(int64_t count) {
    std::vector<T> found(count);
    if (fread(found.data(), sizeof(T), count, stdin) != (size_t)count) throw 1;
    return found;
}

int main() {
    while (true) {
        int64_t sizes[8]; // outputs, inputs, rows, bytes of weights, bits, group, is_half, has_offsets
        if (fread(sizes, sizeof(int64_t), 8, stdin) != 8) return 0;
        Matrix matrix = {};
        matrix.outputs = sizes[0];
        matrix.inputs = sizes[1];
        matrix.kind = sizes[3] == 4 ? FLOAT32 : sizes[3] == 2 ? BFLOAT16 : INTEGERS;
        matrix.grouping = {sizes[4], sizes[5], sizes[6], sizes[7]};
        int64_t groups = matrix.kind == INTEGERS ? groups_of(matrix.grouping, matrix.inputs) : 0;
        auto weights = read<uint8_t>(matrix.outputs * matrix.inputs * sizes[3]);
        auto scales = read<uint8_t>(matrix.kind == INTEGERS ? matrix.outputs * (groups ? groups * matrix.grouping.scale_bytes() : 4) : 0);
        auto offsets = read<float>(matrix.grouping.has_offsets ? matrix.outputs * groups : 0);
        auto inputs = read<float>(sizes[2] * matrix.inputs);
        std::vector<uint8_t> panels(packed_bytes(&matrix));
        pack_matrix(&matrix, weights.data(), scales.data(), offsets.data(), panels.data());
        matrix.panels = panels.data();
        if (matrix.kind == INTEGERS && !groups) matrix.scales = (const float*)scales.data();
        std::vector<float> outputs(sizes[2] * matrix.outputs);
        multiply_all(&matrix, inputs.data(), 0, sizes[2], outputs.data(), 2);
        fwrite(outputs.data(), sizeof(float), outputs.size(), stdout);
    }
}
