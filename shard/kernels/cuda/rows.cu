// Row-wise kernels: embedding, norms, gated activations, gathers. One block a row.
#include "numeric.cuh"

// A row of a step: token, position, KV slot (block * 16 + offset), sequence.
// `step_rows[r].x` is the token, or where in `chosen` it is.
template <typename T>
__device__ void embed(const T *table, const int4 *step_rows, const uint4 *chosen, uint32_t vocab_start,
                      uint32_t vocab_len, float *out, int width) {
    wait_for_inputs();
    let_next_start();
    const size_t row = blockIdx.x;
    const uint32_t given = static_cast<uint32_t>(step_rows[row].x);
    const uint32_t token = (given < CHOSEN ? given : chosen[given - CHOSEN].x) - vocab_start;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[row * width + i] = token < vocab_len ? widen(table[size_t(token) * width + i]) : 0.0f;
}
#define EMBED(NAME, T)                                                                              \
    extern "C" __global__ void NAME(const T *table, const int4 *step_rows, const uint4 *chosen,     \
                                    uint32_t vocab_start, uint32_t vocab_len, float *out,           \
                                    int width) {                                                    \
        embed<T>(table, step_rows, chosen, vocab_start, vocab_len, out, width);                     \
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
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (width % 8 == 0) {
        if (i >= width) return;
        float g[8], u[8];
        load8(gates + i, g);
        load8(ups + i, u);
#pragma unroll
        for (int k = 0; k < 8; k++) g[k] = one(g[k], u[k]);
        store8(out + row * width + i, g);
    } else {
        for (int j = i; j < min(i + 8, width); j++)
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
// [block][kv_head][K | V][16 tokens][head_dim]. A row's heads are [q | k | v].
template <typename T> struct Rotation {
    T *qkv;
    const int4 *step_rows;
    const float *cos, *sin;
    int half_dim, heads, kv_heads, head_dim;
    T *pages;

    __device__ __forceinline__ bool is_head(int head) const { return head < heads + 2 * kv_heads; }
    __device__ __forceinline__ bool is_value(int head) const { return head >= heads + kv_heads; }
    __device__ __forceinline__ T *values(int head) const {
        return qkv + (size_t(blockIdx.x) * (heads + 2 * kv_heads) + head) * head_dim;
    }
    // Where the result of a head goes.
    __device__ __forceinline__ T *place(int head, uint32_t slot) const {
        if (head < heads) return values(head);
        const int kv_head = (head - heads) % kv_heads, part = is_value(head);
        return pages +
            (((size_t(slot / BLOCK_TOKENS) * kv_heads + kv_head) * 2 + part) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
    }
};

// Any shape. Grid: (rows, groups of 8 heads); a warp takes a head.
template <typename T> __device__ void rotate_and_append(const Rotation<T> &of) {
    wait_for_inputs();
    let_next_start();
    const int4 row = of.step_rows[blockIdx.x];
    const int lane = threadIdx.x & 31, head = blockIdx.y * 8 + (threadIdx.x >> 5);
    if (uint32_t(row.z) == NO_SLOT || !of.is_head(head)) return;
    const T *values = of.values(head);
    T *place = of.place(head, row.z);
    const int rotated = of.is_value(head) ? 0 : of.half_dim;
    const float *c = of.cos + size_t(row.y) * of.half_dim, *s = of.sin + size_t(row.y) * of.half_dim;
    for (int i = lane; i < rotated; i += 32) {
        const float a = widen(values[i]), b = widen(values[of.half_dim + i]);
        place[i] = narrow<T>(a * c[i] - b * s[i]);
        place[of.half_dim + i] = narrow<T>(b * c[i] + a * s[i]);
    }
    if (head >= of.heads)
        for (int i = 2 * rotated + lane; i < of.head_dim; i += 32) place[i] = values[i];
}
// Heads that are rotated whole, in pieces of 8. Grid: (rows, groups of threads); a thread takes a piece
// and its partner.
template <typename T> __device__ void rotate_and_append_wide(const Rotation<T> &of) {
    wait_for_inputs();
    let_next_start();
    const int4 row = of.step_rows[blockIdx.x];
    const int index = blockIdx.y * blockDim.x + threadIdx.x, pieces = of.half_dim / 8;
    const int head = index / pieces, i = index % pieces * 8;
    if (uint32_t(row.z) == NO_SLOT || !of.is_head(head)) return;
    const T *values = of.values(head);
    T *place = of.place(head, row.z);
    float a[8], b[8];
    load8(values + i, a);
    load8(values + of.half_dim + i, b);
    if (!of.is_value(head)) {
        float c[8], s[8];
        load8(of.cos + size_t(row.y) * of.half_dim + i, c);
        load8(of.sin + size_t(row.y) * of.half_dim + i, s);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float low = a[k], high = b[k];
            a[k] = low * c[k] - high * s[k];
            b[k] = high * c[k] + low * s[k];
        }
    }
    store8(place + i, a);
    store8(place + of.half_dim + i, b);
}
#define ROTATE_AND_APPEND(NAME, KIND, T)                                                            \
    extern "C" __global__ void NAME(T *qkv, const int4 *step_rows, const float *cos,                \
                                    const float *sin, int half_dim, int heads, int kv_heads,        \
                                    int head_dim, T *pages) {                                       \
        KIND<T>({qkv, step_rows, cos, sin, half_dim, heads, kv_heads, head_dim, pages});            \
    }
ROTATE_AND_APPEND(rotate_and_append_f32, rotate_and_append, float)
ROTATE_AND_APPEND(rotate_and_append_bf16, rotate_and_append, bf16)
ROTATE_AND_APPEND(rotate_and_append_wide_f32, rotate_and_append_wide, float)
ROTATE_AND_APPEND(rotate_and_append_wide_bf16, rotate_and_append_wide, bf16)
