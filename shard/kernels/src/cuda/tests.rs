//! Every kernel against sums in f64 on the host, with odd shapes and outputs that were NaN before.
//! These need a GPU.

mod choices;

use half::bf16;

use super::{
    product::{SKINNY, Skinny},
    *,
};
use crate::{Activation, HeadLayout, KvPages, SequenceRows};

/// What bf16 results may differ by, of the largest value: rounding of the result, and of weights in
/// attention.
const BF16: f64 = 1e-2;
const F32: f64 = 3e-5;

struct Gpu {
    stream: Stream,
    random: u64,
}

impl Gpu {
    fn open() -> Self {
        let context = Context::open(0).expect("a GPU");
        Self { stream: Stream::new(&context).expect("a stream"), random: 1 }
    }

    /// Values around 0 that bf16 holds exactly.
    fn values(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bf16::from_f32((self.random >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
        };
        (0..count).map(|_| next()).collect()
    }

    fn tensor(&self, values: &[f32], width: usize, element: Element) -> Tensor {
        let rows = values.len() / width;
        let mut tensor = Tensor::new(self.stream.context(), rows, width, element).expect("room");
        self.stream.write(&mut tensor, values).expect("write");
        tensor
    }

    fn poisoned(&self, rows: usize, width: usize, element: Element) -> Tensor {
        self.tensor(&vec![f32::NAN; rows * width], width, element)
    }

    fn matrix(&self, values: &[f32], inputs: usize, element: Element) -> Matrix {
        let outputs = values.len() / inputs;
        let mut matrix =
            Matrix::new(self.stream.context(), outputs, inputs, element).expect("room");
        for (output, row) in values.chunks_exact(inputs).enumerate() {
            matrix.set_row(output, row).expect("copy");
        }
        matrix
    }

    fn pages(&self, pages: &Pages) -> Vec<f32> {
        let words = self.stream.read_memory(&pages.memory).expect("read");
        match pages.element {
            Element::F32 => words,
            Element::Bf16 => bytemuck::cast_slice(&words)
                .iter()
                .map(|&v: &u16| bf16::from_bits(v).to_f32())
                .collect(),
        }
    }

    fn read(&self, tensor: &Tensor) -> Vec<f32> {
        self.stream.read_rows(tensor, 0..tensor.rows).expect("read")
    }
}

fn near(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        // NaN fails.
        assert!(off <= tolerance * largest, "{what}: {found} at {index}, expected {expected}");
    }
}

fn product(x: &[f32], w: &[f32], inputs: usize) -> Vec<f64> {
    let dot =
        |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    x.chunks_exact(inputs).flat_map(|x| w.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn check_product(
    gpu: &mut Gpu,
    (rows, outputs, inputs): (usize, usize, usize),
    element: Element,
    out: Element,
) {
    let what = format!("{rows} rows, {outputs}x{inputs} {element:?} to {out:?}");
    let (x, w) = (gpu.values(rows * inputs), gpu.values(outputs * inputs));
    let bias = gpu.values(outputs);
    let mut expected = product(&x, &w, inputs);
    for row in expected.chunks_exact_mut(outputs) {
        row.iter_mut().zip(&bias).for_each(|(value, bias)| *value += f64::from(*bias));
    }
    let (x, w) = (gpu.tensor(&x, inputs, element), gpu.matrix(&w, inputs, element));
    let bias = Vector::new(gpu.stream.context(), &bias).expect("room");
    let mut y = gpu.poisoned(rows, outputs, out);
    gpu.stream.linear(&x, rows, &w, Some(&bias), &mut y).expect(&what);
    let tolerance = if out == Element::F32 { F32 } else { BF16 };
    near(&gpu.read(&y), &expected, tolerance, &what);
    if element == Element::F32 {
        return;
    }
    let fits = |s: &Skinny| inputs.is_multiple_of(64) && rows <= 8 * s.columns;
    for skinny in SKINNY.into_iter().filter(fits) {
        let mut y = gpu.poisoned(rows, outputs, out);
        gpu.stream.linear_by(skinny, &x, rows, &w, Some(&bias), &mut y).expect(&what);
        near(&gpu.read(&y), &expected, tolerance, &format!("{what}, {skinny:?}"));
    }
}

fn check_products(shapes: &[(usize, usize, usize)]) {
    let mut gpu = Gpu::open();
    for &shape in shapes {
        check_product(&mut gpu, shape, Element::F32, Element::F32);
        check_product(&mut gpu, shape, Element::Bf16, Element::F32);
        check_product(&mut gpu, shape, Element::Bf16, Element::Bf16);
    }
}

#[test]
fn products() {
    check_products(&[
        (1, 16, 64),
        (3, 40, 128),
        (8, 100, 576),
        (13, 33, 1536),
        (32, 130, 704),
        (70, 96, 24),
    ]);
}

/// Of the size that models have: too slow under racecheck.
#[test]
fn a_large_product() {
    check_products(&[(1, 4096, 4096)]);
}

#[test]
fn gated_products() {
    let mut gpu = Gpu::open();
    let mut check = |rows: usize, outputs: usize, inputs: usize| {
        let (x, w) = (gpu.values(rows * inputs), gpu.values(2 * outputs * inputs));
        let both = product(&x, &w, inputs);
        let expected: Vec<f64> = both
            .chunks_exact(2 * outputs)
            .flat_map(|row| (0..outputs).map(|i| silu(row[i]) * row[outputs + i]))
            .collect();
        let (x, w) = (gpu.tensor(&x, inputs, Element::Bf16), gpu.matrix(&w, inputs, Element::Bf16));
        let mut scratch = gpu.poisoned(rows, 2 * outputs, Element::Bf16);
        let mut y = gpu.poisoned(rows, outputs, Element::Bf16);
        let silu = Activation::Silu;
        gpu.stream.gated_linear(silu, &x, rows, (&w, None), &mut scratch, &mut y).expect("gated");
        near(&gpu.read(&y), &expected, 2.0 * BF16, &format!("gated {rows} {outputs}x{inputs}"));
        for skinny in SKINNY.into_iter().filter(|s| rows <= 8 * s.columns) {
            let mut y = gpu.poisoned(rows, outputs, Element::Bf16);
            gpu.stream.gated_by(skinny, &x, rows, &w, &mut y).expect("gated");
            near(&gpu.read(&y), &expected, 2.0 * BF16, &format!("{skinny:?} {rows}"));
        }
    };
    for (rows, outputs, inputs) in [(1, 8, 64), (5, 44, 128), (16, 100, 192), (31, 64, 320)] {
        check(rows, outputs, inputs);
    }
}

#[test]
fn norms() {
    let mut gpu = Gpu::open();
    let mut check = |rows: usize, width: usize, element: Element| {
        let (x, d) = (gpu.values(rows * width), gpu.values(rows * width));
        let weight = gpu.values(width);
        let sums: Vec<f64> = x.iter().zip(&d).map(|(x, d)| f64::from(*x) + f64::from(*d)).collect();
        let mut expected = Vec::new();
        for row in sums.chunks_exact(width) {
            let square = row.iter().map(|v| v * v).sum::<f64>() / width as f64;
            let factor = (square + 1e-5).sqrt().recip();
            expected.extend(row.iter().zip(&weight).map(|(v, w)| v * factor * f64::from(*w)));
        }
        let residual = gpu.tensor(&x, width, Element::F32);
        let delta = gpu.tensor(&d, width, element);
        let weight = Vector::new(gpu.stream.context(), &weight).expect("room");
        let mut y = gpu.poisoned(rows, width, element);
        let norm = (&weight, 1e-5);
        gpu.stream.add_rms_norm(&residual, Some(&delta), rows, norm, &mut y).expect("norm");
        let tolerance = if element == Element::F32 { F32 } else { BF16 };
        near(&gpu.read(&y), &expected, tolerance, &format!("norm {rows}x{width}"));
        near(&gpu.read(&residual), &sums, F32, "residual");
    };
    for (rows, width) in [(1, 64), (3, 37), (5, 576), (2, 4096)] {
        check(rows, width, Element::F32);
        check(rows, width, Element::Bf16);
    }
}

/// One attention case: `(rows, context)` of each sequence.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: usize,
    soft_cap: f32,
    sequences: Vec<(usize, usize)>,
}

/// Keys and values `[token][kv_head][K | V][head_dim]` of every sequence, and what attention makes of
/// the queries.
fn attend(case: &Case, scale: f64, qkv: &[f32], cache: &[Vec<f32>]) -> Vec<f64> {
    let Case { heads, kv_heads, head_dim, window, soft_cap, sequences } = case;
    let row_len = (heads + 2 * kv_heads) * head_dim;
    let mut out = Vec::new();
    let mut row = 0;
    for (&(rows, context), cache) in sequences.iter().zip(cache) {
        let at = |token: usize, kv: usize, part: usize| {
            &cache[((token * kv_heads + kv) * 2 + part) * head_dim..][..*head_dim]
        };
        for index in 0..rows {
            let position = context - rows + index;
            let oldest = if *window > 0 { (position + 1).saturating_sub(*window) } else { 0 };
            for head in 0..*heads {
                let kv = head * kv_heads / heads;
                let q = &qkv[row * row_len + head * head_dim..][..*head_dim];
                let scores: Vec<f64> = (oldest..=position)
                    .map(|token| {
                        let score = product(q, at(token, kv, 0), *head_dim)[0] * scale;
                        let cap = f64::from(*soft_cap);
                        if cap > 0.0 { cap * (score / cap).tanh() } else { score }
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                out.extend((0..*head_dim).map(|dim| {
                    let of = |(i, w): (usize, &f64)| w * f64::from(at(oldest + i, kv, 1)[dim]);
                    weights.iter().enumerate().map(of).sum::<f64>() / sum
                }));
            }
            row += 1;
        }
    }
    out
}

fn check_attention(gpu: &mut Gpu, case: &Case, element: Element) {
    let Case { heads, kv_heads, head_dim, .. } = *case;
    let what = format!(
        "heads {heads}/{kv_heads} of {head_dim}, {:?}, window {}, {element:?}",
        case.sequences, case.window
    );
    let row_len = (heads + 2 * kv_heads) * head_dim;
    let rows: usize = case.sequences.iter().map(|(rows, _)| rows).sum();
    let qkv = gpu.values(rows * row_len);
    let token_len = kv_heads * 2 * head_dim;
    let cache: Vec<Vec<f32>> =
        case.sequences.iter().map(|&(_, context)| gpu.values(context * token_len)).collect();
    // Blocks in a scattered order; those of nobody hold NaN.
    let counts: Vec<usize> =
        case.sequences.iter().map(|(_, context)| context.div_ceil(16)).collect();
    let num_blocks = counts.iter().sum::<usize>() + 3;
    let mut free = (0..num_blocks as u32).rev();
    let tables: Vec<Vec<u32>> =
        counts.iter().map(|&count| free.by_ref().take(count).collect()).collect();
    let mut pages =
        Pages::new(gpu.stream.context(), num_blocks, kv_heads, head_dim, element).expect("room");
    let mut values = vec![f32::NAN; num_blocks * 16 * token_len];
    for (cache, table) in cache.iter().zip(&tables) {
        for (token, of_token) in cache.chunks_exact(token_len).enumerate() {
            let block = table[token / 16] as usize;
            for (part, of_part) in of_token.chunks_exact(head_dim).enumerate() {
                let at = ((block * kv_heads * 2 + part) * 16 + token % 16) * head_dim;
                values[at..at + head_dim].copy_from_slice(of_part);
            }
        }
    }
    let bytes: Vec<u8> = match element {
        Element::F32 => bytemuck::cast_slice(&values).to_vec(),
        Element::Bf16 => {
            values.iter().flat_map(|&v| bf16::from_f32(v).to_bits().to_ne_bytes()).collect()
        }
    };
    pages.memory.upload(0, &bytes).expect("copy");
    let mut first_row = 0;
    let sequences = case.sequences.iter().zip(&tables).map(|(&(rows, context_len), blocks)| {
        first_row += rows;
        SequenceRows { first_row: first_row - rows, rows, context_len, blocks }
    });
    let mut inputs =
        StepInputs::new(gpu.stream.context(), rows, case.sequences.len(), 100).expect("room");
    inputs.fill(sequences, &[], &[]).expect("fill");
    inputs.upload(&gpu.stream).expect("copy");
    let layout = HeadLayout {
        heads,
        kv_heads,
        head_dim,
        kv_of_head: (0..heads).map(|head| head * kv_heads / heads).collect(),
    };
    let scale = (head_dim as f32).sqrt().recip() * 4.0;
    let expected = attend(case, f64::from(scale), &qkv, &cache);
    let qkv = gpu.tensor(&qkv, row_len, element);
    let mut out = gpu.poisoned(rows, heads * head_dim, element);
    let scoring = Scoring { scale, soft_cap: case.soft_cap, window: case.window as i32 };
    // Twice: counters of split sequences have to be back at 0.
    for _ in 0..2 {
        gpu.stream
            .paged_attention(&qkv, &layout, scoring, &inputs, rows, &pages, &mut out)
            .expect(&what);
    }
    let tolerance = if element == Element::F32 { F32 } else { BF16 };
    near(&gpu.read(&out), &expected, tolerance, &what);
}

#[test]
fn attention() {
    let mut gpu = Gpu::open();
    let long: Vec<(usize, usize)> =
        vec![(1, 1), (1, 16), (1, 17), (1, 64), (1, 200), (1, 999), (1, 33)];
    let mixed = vec![(1, 40), (1, 5), (70, 70), (1, 9), (130, 300), (7, 150)];
    // Ends inside a page, at a page's and at a tile's end, with history and without.
    let chunks = vec![(128, 128), (257, 257), (64, 384), (300, 555), (129, 640), (2, 3)];
    for (heads, kv_heads) in [(9, 3), (8, 2), (4, 4), (32, 1)] {
        for head_dim in [64, 128, 256, 24] {
            for (window, soft_cap, sequences) in [
                (0, 0.0, &long),
                (0, 0.0, &mixed),
                (0, 0.0, &chunks),
                (50, 0.0, &long),
                (50, 3.0, &mixed),
                (200, 0.0, &chunks),
            ] {
                let sequences = sequences.clone();
                let case = Case { heads, kv_heads, head_dim, window, soft_cap, sequences };
                check_attention(&mut gpu, &case, Element::Bf16);
                if head_dim < 100 {
                    check_attention(&mut gpu, &case, Element::F32);
                }
            }
        }
    }
}

#[test]
fn rotation_and_append() {
    let mut gpu = Gpu::open();
    let mut check = |(heads, kv_heads, head_dim, half): (usize, usize, usize, usize), element| {
        let what = format!("heads {heads}/{kv_heads} of {head_dim}, half {half}, {element:?}");
        let (rows, row_len) = (3, (heads + 2 * kv_heads) * head_dim);
        let qkv = gpu.values(rows * row_len);
        let (cos, sin) = (gpu.values(40 * half), gpu.values(40 * half));
        let kv_of_head = (0..heads).map(|head| head * kv_heads / heads).collect();
        let layout = HeadLayout { heads, kv_heads, head_dim, kv_of_head };
        let context = gpu.stream.context().clone();
        let mut pages = Pages::new(&context, 4, kv_heads, head_dim, element).expect("room");
        let mut inputs = StepInputs::new(&context, rows, 1, 4).expect("room");
        let blocks = [3, 1, 2];
        // Positions 31, 32 and 33, in two blocks.
        let sequence = SequenceRows { first_row: 0, rows, context_len: 34, blocks: &blocks };
        inputs.fill([sequence].into_iter(), &[], &[]).expect("fill");
        inputs.upload(&gpu.stream).expect("copy");
        let mut tensor = gpu.tensor(&qkv, row_len, element);
        let tables = [&cos, &sin].map(|table| Vector::new(&context, table).expect("room"));
        let table = (&tables[0], &tables[1], half);
        gpu.stream
            .rotate_and_append(&mut tensor, &layout, table, &inputs, rows, &mut pages)
            .expect(&what);
        let mut expected: Vec<f64> = qkv.iter().map(|&v| f64::from(v)).collect();
        for row in 0..rows {
            let angle = |table: &[f32], pair: usize| f64::from(table[(31 + row) * half + pair]);
            for head in 0..heads + kv_heads {
                for pair in 0..half {
                    let at = row * row_len + head * head_dim + pair;
                    let (a, b) = (expected[at], expected[at + half]);
                    let (c, s) = (angle(&cos, pair), angle(&sin, pair));
                    (expected[at], expected[at + half]) = (a * c - b * s, b * c + a * s);
                }
            }
        }
        let tolerance = if element == Element::F32 { F32 } else { BF16 };
        let found = gpu.read(&tensor);
        let stored = gpu.pages(&pages);
        for row in 0..rows {
            let queries = row * row_len..row * row_len + heads * head_dim;
            near(&found[queries.clone()], &expected[queries], tolerance, &what);
            let position = 31 + row;
            let block = blocks[position / KvPages::BLOCK_TOKENS] as usize;
            let slot = position % KvPages::BLOCK_TOKENS;
            for (part, of) in [(0, heads), (1, heads + kv_heads)] {
                for head in 0..kv_heads {
                    let page = (block * kv_heads + head) * 2 + part;
                    let at = (page * KvPages::BLOCK_TOKENS + slot) * head_dim;
                    let from = row * row_len + (of + head) * head_dim;
                    let values = &expected[from..from + head_dim];
                    near(&stored[at..at + head_dim], values, tolerance, &what);
                }
            }
        }
    };
    for element in [Element::F32, Element::Bf16] {
        for shape in
            [(3, 2, 24, 10), (9, 3, 64, 32), (5, 1, 128, 64), (4, 2, 128, 32), (3, 3, 80, 40)]
        {
            check(shape, element);
        }
    }
}

#[test]
fn rows_of_experts() {
    let mut gpu = Gpu::open();
    let mut check = |element: Element, tolerance: f64| {
        let (rows, width) = (5, 37);
        let (listed, weights) = ([4, 0, 3, 3], [0.5, 2.0, -1.0, 0.25]);
        let mut list = WeightedRows::new(gpu.stream.context(), 4).expect("room");
        list.fill(&listed, &weights).expect("copy");
        let (x, answers) = (gpu.values(rows * width), gpu.values(listed.len() * width));
        let tensor = gpu.tensor(&x, width, element);
        let mut taken = gpu.poisoned(2, width, element);
        gpu.stream.take_rows(&tensor, &list, 1..3, &mut taken).expect("take");
        let expected: Vec<f64> =
            x[..width].iter().chain(&x[3 * width..4 * width]).map(|&v| f64::from(v)).collect();
        near(&gpu.read(&taken), &expected, tolerance, "taken rows");
        let mut sum = gpu.poisoned(rows, width, Element::F32);
        gpu.stream.clear(&mut sum, rows).expect("clear");
        let mut expected = vec![0.0; rows * width];
        for range in [0..3, 3..4] {
            let part = &answers[range.start * width..range.end * width];
            let part = gpu.tensor(part, width, Element::F32);
            gpu.stream.add_weighted(&part, &list, range, &mut sum).expect("add");
        }
        for (index, (&row, &weight)) in listed.iter().zip(&weights).enumerate() {
            for column in 0..width {
                let answer = f64::from(answers[index * width + column]);
                expected[row as usize * width + column] += f64::from(weight) * answer;
            }
        }
        let mut out = gpu.poisoned(rows, width, element);
        gpu.stream.round(&sum, rows, &mut out).expect("round");
        near(&gpu.read(&out), &expected, tolerance, "weighted sums");
    };
    check(Element::F32, F32);
    check(Element::Bf16, BF16);
}
