// Mixtures of experts: what an expert answered goes back to the rows it was asked for.
#include "numeric.cuh"

// sum[rows[i]] += weights[i] * answers[i]; no row twice.
extern "C" __global__ void add_weighted(const float *answers, const uint32_t *rows, const float *weights,
                                        float *sum, int width) {
    wait_for_inputs();
    let_next_start();
    const float *from = answers + size_t(blockIdx.x) * width;
    float *to = sum + size_t(rows[blockIdx.x]) * width;
    const float weight = weights[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] += weight * from[i];
}

// out = x, rounded to its type.
template <typename T> __device__ void round_to(const float *x, T *out, size_t count) {
    wait_for_inputs();
    let_next_start();
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = narrow<T>(x[i]);
}
extern "C" __global__ void round_f32(const float *x, float *out, size_t count) { round_to(x, out, count); }
extern "C" __global__ void round_bf16(const float *x, bf16 *out, size_t count) { round_to(x, out, count); }
