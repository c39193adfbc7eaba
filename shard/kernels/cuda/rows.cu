// Row-wise kernels: embedding, norms, gated activations, gathers. One block a row.
#include "numeric.cuh"

// A row of a step: token, position, KV slot (block * 16 + offset), sequence.
// `step_rows[r].x` is the token.
template <typename T>
__device__ void embed(const T *table, const int4 *step_rows, uint32_t vocab_start, uint32_t vocab_len,
                      float *out, int width) {
    wait_for_inputs();
    let_next_start();
    const size_t row = blockIdx.x;
    const uint32_t token = static_cast<uint32_t>(step_rows[row].x) - vocab_start;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[row * width + i] = token < vocab_len ? widen(table[size_t(token) * width + i]) : 0.0f;
}
#define EMBED(NAME, T)                                                                              \
    extern "C" __global__ void NAME(const T *table, const int4 *step_rows, uint32_t vocab_start,     \
                                    uint32_t vocab_len, float *out, int width) {                    \
        embed<T>(table, step_rows, vocab_start, vocab_len, out, width);                             \
    }
EMBED(embed_f32, float)
EMBED(embed_bf16, bf16)

// residual += delta (where there is one); out = residual / rms(residual) * weight.
// Shared memory: the row, then 33 floats.
template <typename X, typename T>
__device__ void add_rms_norm(X *residual, const T *delta, const float *weight, float eps, T *out,
                             int width) {
    extern __shared__ __align__(16) float row_values[];
    float *scratch = row_values + ((width + 3) & ~3);
    wait_for_inputs();
    let_next_start();
    const size_t start = size_t(blockIdx.x) * width;
    float squares = 0.0f;
    if (width % 4 == 0) {
        for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
            float4 x = load4(residual + start + i);
            if (delta) {
                float4 d = load4(delta + start + i);
                x = make_float4(x.x + d.x, x.y + d.y, x.z + d.z, x.w + d.w);
                store4(residual + start + i, x);
            }
            store4(row_values + i, x);
            squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
        }
        const float factor = rsqrtf(block_sum(squares, scratch) / width + eps);
        for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
            float4 x = load4(row_values + i), w = load4(weight + i);
            store4(out + start + i, make_float4(x.x * factor * w.x, x.y * factor * w.y,
                                                x.z * factor * w.z, x.w * factor * w.w));
        }
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            float x = widen(residual[start + i]);
            if (delta) {
                x += widen(delta[start + i]);
                residual[start + i] = narrow<X>(x);
            }
            row_values[i] = x;
            squares += x * x;
        }
        const float factor = rsqrtf(block_sum(squares, scratch) / width + eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            out[start + i] = narrow<T>(row_values[i] * factor * weight[i]);
    }
}
#define ADD_RMS_NORM(NAME, T)                                                                       \
    extern "C" __global__ void NAME(float *residual, const T *delta, const float *weight, float eps, \
                                    T *out, int width) {                                            \
        add_rms_norm<float, T>(residual, delta, weight, eps, out, width);                                  \
    }
ADD_RMS_NORM(add_rms_norm_f32, float)
ADD_RMS_NORM(add_rms_norm_bf16, bf16)
// Without a delta: `x` is only read.
extern "C" __global__ void rms_norm_bf16(bf16 *x, const bf16 *delta, const float *weight, float eps,
                                         bf16 *out, int width) {
    add_rms_norm<bf16, bf16>(x, nullptr, weight, eps, out, width);
}

// Norm of each query and key head, in place; one block a (row, head), 32 threads.
template <typename T>
__device__ void rms_norm_heads(T *qkv, int row_len, int heads, int head_dim, const float *query,
                               const float *key, float eps) {
    wait_for_inputs();
    let_next_start();
    T *head = qkv + size_t(blockIdx.x) * row_len + size_t(blockIdx.y) * head_dim;
    const float *weight = blockIdx.y < heads ? query : key;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < head_dim; i += 32) squares += widen(head[i]) * widen(head[i]);
    const float factor = rsqrtf(warp_sum(squares) / head_dim + eps);
    for (int i = threadIdx.x; i < head_dim; i += 32)
        head[i] = narrow<T>(widen(head[i]) * factor * weight[i]);
}
#define RMS_NORM_HEADS(NAME, T)                                                                     \
    extern "C" __global__ void NAME(T *qkv, int row_len, int heads, int head_dim,                   \
                                    const float *query, const float *key, float eps) {              \
        rms_norm_heads<T>(qkv, row_len, heads, head_dim, query, key, eps);                          \
    }
RMS_NORM_HEADS(rms_norm_heads_f32, float)
RMS_NORM_HEADS(rms_norm_heads_bf16, bf16)

// x += delta.
template <typename T> __device__ void add(float *x, const T *delta, size_t count) {
    wait_for_inputs();
    let_next_start();
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] += widen(delta[i]);
}
extern "C" __global__ void add_f32(float *x, const float *delta, size_t count) { add(x, delta, count); }
extern "C" __global__ void add_bf16(float *x, const bf16 *delta, size_t count) { add(x, delta, count); }

// x *= factor.
template <typename T> __device__ void scale(T *x, float factor, size_t count) {
    wait_for_inputs();
    let_next_start();
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] = narrow<T>(widen(x[i]) * factor);
}
extern "C" __global__ void scale_f32(float *x, float factor, size_t count) { scale(x, factor, count); }
extern "C" __global__ void scale_bf16(bf16 *x, float factor, size_t count) { scale(x, factor, count); }

// x[row] += bias.
template <typename T> __device__ void add_bias(T *x, const float *bias, int width) {
    wait_for_inputs();
    let_next_start();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        size_t at = size_t(blockIdx.x) * width + i;
        x[at] = narrow<T>(widen(x[at]) + bias[i]);
    }
}
extern "C" __global__ void add_bias_f32(float *x, const float *bias, int width) { add_bias(x, bias, width); }
extern "C" __global__ void add_bias_bf16(bf16 *x, const float *bias, int width) { add_bias(x, bias, width); }

// out[i] = x[indices[i]].
template <typename T> __device__ void gather(const T *x, const uint32_t *indices, T *out, int width) {
    wait_for_inputs();
    let_next_start();
    const T *from = x + size_t(indices[blockIdx.x]) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[size_t(blockIdx.x) * width + i] = from[i];
}
extern "C" __global__ void gather_f32(const float *x, const uint32_t *indices, float *out, int width) {
    gather(x, indices, out, width);
}
extern "C" __global__ void gather_bf16(const bf16 *x, const uint32_t *indices, bf16 *out, int width) {
    gather(x, indices, out, width);
}

// out = activation(gate) * up of rows [gate | up]. `tanh_gelu`: GELU in its tanh form, else SiLU.
template <typename T>
__device__ void gate_mul(const T *gate_up, T *out, int width, int tanh_gelu) {
    wait_for_inputs();
    let_next_start();
    const size_t row = blockIdx.y;
    auto one = [&](float gate, float up) {
        float active = tanh_gelu
            ? 0.5f * gate * (1.0f + tanhf(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate)))
            : gate / (1.0f + __expf(-gate));
        return active * up;
    };
    const T *gates = gate_up + row * 2 * width, *ups = gates + width;
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (width % 4 == 0) {
        if (i >= width) return;
        float4 g = load4(gates + i), u = load4(ups + i);
        store4(out + row * width + i,
               make_float4(one(g.x, u.x), one(g.y, u.y), one(g.z, u.z), one(g.w, u.w)));
    } else {
        for (int j = i; j < min(i + 4, width); j++)
            out[row * width + j] = narrow<T>(one(widen(gates[j]), widen(ups[j])));
    }
}
extern "C" __global__ void gate_mul_f32(const float *gate_up, float *out, int width, int tanh_gelu) {
    gate_mul(gate_up, out, width, tanh_gelu);
}
extern "C" __global__ void gate_mul_bf16(const bf16 *gate_up, bf16 *out, int width, int tanh_gelu) {
    gate_mul(gate_up, out, width, tanh_gelu);
}

// Rotates q in place (pairs i, i + half_dim) and writes rotated k, and v, to the pages
// [block][kv_head][K | V][16 tokens][head_dim]. Grid: (rows, groups of 8 heads); a warp takes a head of
// [q | k | v].
template <typename T>
__device__ void rotate_and_append(T *qkv, const int4 *step_rows, const float *cos, const float *sin,
                                  int half_dim, int heads, int kv_heads, int head_dim, T *pages) {
    wait_for_inputs();
    let_next_start();
    const int4 row = step_rows[blockIdx.x];
    const uint32_t slot = static_cast<uint32_t>(row.z);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y * 8 + warp;
    if (slot == NO_SLOT || head >= heads + 2 * kv_heads) return;
    T *values = qkv + (size_t(blockIdx.x) * (heads + 2 * kv_heads) + head) * head_dim;
    // Where a key or value of this head goes.
    const int kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    const int part = head < heads + kv_heads ? 0 : 1;
    T *place = pages +
        (((size_t(slot / BLOCK_TOKENS) * kv_heads + kv_head) * 2 + part) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
    const bool kept = head >= heads;
    const int rotated = part == 0 ? half_dim : 0;
    const float *c = cos + size_t(row.y) * half_dim, *s = sin + size_t(row.y) * half_dim;
    if (half_dim % 4 == 0 && head_dim % 4 == 0) {
        for (int i = lane * 4; i < rotated; i += 128) {
            const float4 a = load4(values + i), b = load4(values + half_dim + i), u = load4(c + i), w = load4(s + i);
            const float4 low = make_float4(a.x * u.x - b.x * w.x, a.y * u.y - b.y * w.y,
                                           a.z * u.z - b.z * w.z, a.w * u.w - b.w * w.w);
            const float4 high = make_float4(b.x * u.x + a.x * w.x, b.y * u.y + a.y * w.y,
                                            b.z * u.z + a.z * w.z, b.w * u.w + a.w * w.w);
            if (kept) {
                store4(place + i, low);
                store4(place + half_dim + i, high);
            } else {
                store4(values + i, low);
                store4(values + half_dim + i, high);
            }
        }
        if (kept)
            for (int i = 2 * rotated + lane * 4; i < head_dim; i += 128) store4(place + i, load4(values + i));
        return;
    }
    for (int i = lane; i < rotated; i += 32) {
        const float a = widen(values[i]), b = widen(values[half_dim + i]);
        T *to = kept ? place : values;
        to[i] = narrow<T>(a * c[i] - b * s[i]);
        to[half_dim + i] = narrow<T>(b * c[i] + a * s[i]);
    }
    if (kept)
        for (int i = 2 * rotated + lane; i < head_dim; i += 32) place[i] = values[i];
}
#define ROTATE_AND_APPEND(NAME, T)                                                                  \
    extern "C" __global__ void NAME(T *qkv, const int4 *step_rows, const float *cos,                \
                                    const float *sin, int half_dim, int heads, int kv_heads,        \
                                    int head_dim, T *pages) {                                       \
        rotate_and_append<T>(qkv, step_rows, cos, sin, half_dim, heads, kv_heads, head_dim, pages); \
    }
ROTATE_AND_APPEND(rotate_and_append_f32, float)
ROTATE_AND_APPEND(rotate_and_append_bf16, bf16)
