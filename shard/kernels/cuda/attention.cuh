// What the attention kernels agree on. KV pages: [block][kv_head][K | V][16 tokens][head_dim].
#pragma once
#include "numeric.cuh"

// Query heads that share a KV head, at most 16 a tile: the rows of a tensor-core product.
struct HeadTiles {
    uint16_t kv_head[64];
    uint16_t first_head[64];
    uint16_t count[64];
};

// For each query head the KV head it reads.
struct KvOfHead {
    uint8_t kv_head[256];
};

// How scores are made of products. `scale_log2`: the factor times log2(e), since powers are of two.
// `window`: a position sees so many last ones, its own among them; 0: all. `soft_cap`: 0: none.
struct Scoring {
    float scale;
    float soft_cap;
    int window;
};

// 2^x to 2 units in the last place; 0 below the normal floats.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.4426950408889634f;

// 16-byte pieces of a shared-memory row of HEAD_DIM bf16 are permuted so that 8 rows at one column
// fall into 8 different banks.
template <int HEAD_DIM> __device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    return row * (HEAD_DIM * 2) + ((piece ^ (row & 7)) << 4);
}
