//! Throughput of each kernel beside two floors measured in the same run: how fast this machine reads
//! memory, and how many multiply-adds it can do. `cargo bench -p trireme-kernels`.
//!
//! Shapes are those of SmolLM2-135M (9 heads, 3 KV heads, 576 wide) and of a layer of Llama-3.1-8B.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use trireme_kernels::{
    Activation, HeadLayout, KvPages, Matrix, RotaryTable, SequenceRows, Storage, Team, argmax,
    gate_mul, matmul, max_and_sum_exp, paged_attention, rms_norm, rotate_and_append, share, top_n,
};

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

fn gflop(multiply_adds: usize) -> Throughput {
    Throughput::Elements(2 * multiply_adds as u64)
}

/// Reads `values`; sixty-four sums, so that the adds do not wait for each other.
#[inline(never)]
fn read(values: &[f32]) -> f32 {
    let mut sums = [0.0; 64];
    for values in values.as_chunks::<64>().0 {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += value;
        }
    }
    sums.iter().sum()
}

/// The two floors. The second is a product whose operands all stay in the first caches.
fn floors(c: &mut Criterion) {
    let team = Team::new(threads());
    let mut group = c.benchmark_group("floor");
    let values = vec![1.0; 64 << 20];
    let sums: Vec<AtomicU32> = (0..threads()).map(|_| AtomicU32::new(0)).collect();
    group.throughput(Throughput::Bytes(4 * values.len() as u64));
    group.bench_function("read", |b| {
        b.iter(|| {
            team.run(&|worker| {
                let mine = share(values.len(), 1024, worker, team.threads());
                sums[worker].store(read(&values[mine]).to_bits(), Relaxed);
            });
        });
    });
    const TIMES: usize = 8192;
    let (rows, inputs, outputs) = (12, 128, 32);
    let (x, w) = (vec![0.5; rows * inputs], Matrix::new(outputs, inputs, Storage::F32));
    let alone = || {
        let (team, mut out) = (Team::new(1), vec![0.0; rows * outputs]);
        (0..TIMES).for_each(|_| matmul(&team, &x, rows, &w, None, &mut out));
    };
    group.throughput(gflop(threads() * TIMES * rows * inputs * outputs));
    group.bench_function("multiply-add", |b| {
        b.iter(|| {
            std::thread::scope(|scope| (0..threads()).for_each(|_| _ = scope.spawn(alone)));
        });
    });
    group.throughput(Throughput::Elements(64));
    group.bench_function("fork-join x64", |b| {
        b.iter(|| (0..64).for_each(|_| team.run(&|worker| _ = black_box(worker))));
    });
}

fn products(c: &mut Criterion) {
    let team = Team::new(threads());
    for (outputs, inputs) in [(960, 576), (3072, 576), (49_152, 576), (28_672, 4096)] {
        for storage in [Storage::F32, Storage::Bf16] {
            let mut group = c.benchmark_group(format!("matmul {outputs}x{inputs} {storage:?}"));
            let w = Matrix::new(outputs, inputs, storage);
            for rows in [1, 16, 512] {
                if rows * outputs * inputs > 1 << 34 {
                    continue;
                }
                let (x, mut out) = (vec![0.5; rows * inputs], vec![0.0; rows * outputs]);
                group.throughput(if rows == 1 {
                    Throughput::Bytes(w.bytes() as u64)
                } else {
                    gflop(rows * outputs * inputs)
                });
                group.bench_function(BenchmarkId::from_parameter(rows), |b| {
                    b.iter(|| matmul(&team, &x, rows, &w, None, &mut out));
                });
            }
        }
    }
}

fn attention(c: &mut Criterion) {
    let team = Team::new(threads());
    let kv_of_head = (0..9).map(|head| head / 3).collect();
    let layout = HeadLayout { heads: 9, kv_heads: 3, head_dim: 64, kv_of_head };
    for storage in [Storage::F32, Storage::Bf16] {
        let mut group = c.benchmark_group(format!("attention {storage:?}"));
        for (count, rows, context_len) in [(1, 1, 128), (1, 1, 4096), (64, 1, 512), (1, 512, 512)] {
            let per_sequence = context_len / KvPages::BLOCK_TOKENS;
            let pages = KvPages::new(count * per_sequence, 3, 64, storage);
            let tables: Vec<Vec<u32>> = (0..count * per_sequence)
                .collect::<Vec<_>>()
                .chunks(per_sequence)
                .map(|blocks| blocks.iter().map(|&block| block as u32).collect())
                .collect();
            let sequences: Vec<SequenceRows<'_>> = tables
                .iter()
                .enumerate()
                .map(|(i, blocks)| SequenceRows { first_row: i * rows, rows, context_len, blocks })
                .collect();
            let qkv = vec![0.1; count * rows * layout.row_len()];
            let mut out = vec![0.0; count * rows * 9 * 64];
            group.throughput(if rows == 1 {
                Throughput::Bytes((count * context_len * 2 * 3 * 64 * storage.bytes()) as u64)
            } else {
                gflop(rows * context_len * 9 * 64)
            });
            let name = format!("{count} x {rows} of {context_len}");
            group.bench_function(name, |b| {
                b.iter(|| {
                    let (q, o) = (&qkv, &mut out);
                    paged_attention(&team, q, &layout, 0.125, None, &sequences, &pages, o);
                });
            });
        }
    }
}

fn rows(c: &mut Criterion) {
    let team = Team::new(threads());
    let mut group = c.benchmark_group("rows");
    for rows in [1, 512] {
        let (x, weight) = (vec![0.3; rows * 576], vec![1.0; 576]);
        let mut out = vec![0.0; rows * 576];
        group.throughput(Throughput::Bytes(8 * x.len() as u64));
        group.bench_function(format!("rms_norm {rows}x576"), |b| {
            b.iter(|| rms_norm(&team, &x, &weight, 1e-5, &mut out));
        });
        let (x, mut out) = (vec![0.3; rows * 3072], vec![0.0; rows * 1536]);
        group.throughput(Throughput::Bytes(6 * x.len() as u64));
        group.bench_function(format!("silu_mul {rows}x1536"), |b| {
            b.iter(|| gate_mul(&team, Activation::Silu, &x, 1536, &mut out));
        });
        let kv_of_head = (0..9).map(|head| head / 3).collect();
        let layout = HeadLayout { heads: 9, kv_heads: 3, head_dim: 64, kv_of_head };
        let angles = vec![0.5; 512 * 32];
        let rotary = RotaryTable { cos: angles.clone(), sin: angles, half_dim: 32 };
        let blocks: Vec<u32> = (0..32).collect();
        let sequences = [SequenceRows { first_row: 0, rows, context_len: 512, blocks: &blocks }];
        let mut pages = KvPages::new(32, 3, 64, Storage::Bf16);
        let mut qkv = vec![0.1; rows * layout.row_len()];
        group.throughput(Throughput::Bytes(8 * qkv.len() as u64));
        group.bench_function(format!("rotate_and_append {rows}x960"), |b| {
            b.iter(|| rotate_and_append(&team, &mut qkv, &layout, &rotary, &sequences, &mut pages));
        });
    }
}

fn logits(c: &mut Criterion) {
    let row: Vec<f32> = (0..49_152).map(|i| (i * 7919 % 49_157) as f32 * 0.001).collect();
    let mut group = c.benchmark_group("logits");
    group.throughput(Throughput::Bytes(4 * row.len() as u64));
    group.bench_function("argmax", |b| b.iter(|| argmax(black_box(&row))));
    group.bench_function("max_and_sum_exp", |b| b.iter(|| max_and_sum_exp(black_box(&row))));
    group.bench_function("top 20", |b| b.iter(|| top_n(black_box(&row), 20)));
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    targets = floors, products, attention, rows, logits
}
criterion_main!(kernels);
