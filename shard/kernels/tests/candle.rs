//! The public kernels against candle's operators, an implementation that shares nothing with ours.

use candle_core::{D, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trireme_kernels::{
    Activation, HeadLayout, KvPages, Matrix, RotaryTable, SequenceRows, Storage, Team, gate_mul,
    matmul, paged_attention, rms_norm, rotate_and_append,
};

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn tensor(x: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(x, shape, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn check(what: &str, ours: &[f32], theirs: &Tensor, tolerance: f32) {
    let theirs = values(theirs);
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (i, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        let close = (ours - theirs).abs() <= tolerance;
        assert!(close, "{what}: {ours} for {theirs} at {i}");
    }
}

#[test]
fn matmul_agrees() {
    let (inputs, outputs) = (576, 333);
    let weights = noise(outputs * inputs, 2);
    let mut w = Matrix::new(outputs, inputs, Storage::F32);
    for (output, row) in weights.chunks_exact(inputs).enumerate() {
        w.set_row(output, row);
    }
    let weights = tensor(&weights, &[outputs, inputs]).t().unwrap();
    for rows in [1, 19] {
        let x = noise(rows * inputs, 1);
        let mut ours = vec![f32::NAN; rows * outputs];
        matmul(&Team::new(2), &x, rows, &w, None, &mut ours);
        check("matmul", &ours, &tensor(&x, &[rows, inputs]).matmul(&weights).unwrap(), 5e-5);
    }
}

#[test]
fn rms_norm_agrees() {
    let (rows, width) = (6, 576);
    let (x, weight) = (noise(rows * width, 6), noise(width, 7));
    let mut ours = vec![f32::NAN; rows * width];
    rms_norm(&Team::new(1), &x, &weight, 1e-5, &mut ours);
    let (x, weight) = (tensor(&x, &[rows, width]), tensor(&weight, &[width]));
    check("rms_norm", &ours, &candle_nn::ops::rms_norm(&x, &weight, 1e-5).unwrap(), 5e-6);
}

#[test]
fn gate_mul_agrees() {
    let (rows, width) = (3, 1536);
    let gate_up = noise(rows * 2 * width, 9);
    let both = tensor(&gate_up, &[rows, 2 * width]);
    let (gate, up) = (both.narrow(D::Minus1, 0, width), both.narrow(D::Minus1, width, width));
    let gelu = (gate.unwrap().gelu().unwrap() * up.unwrap()).unwrap();
    for (activation, theirs) in
        [(Activation::Silu, candle_nn::ops::swiglu(&both).unwrap()), (Activation::GeluTanh, gelu)]
    {
        let mut ours = vec![f32::NAN; rows * width];
        gate_mul(&Team::new(2), activation, &gate_up, width, &mut ours);
        check(&format!("{activation:?}"), &ours, &theirs, 1e-6);
    }
}

const ROWS: usize = 50;
const HEADS: usize = 3;
const DIM: usize = 64;

fn rotary() -> RotaryTable {
    let half_dim = DIM / 2;
    let angle =
        |i: usize| (i / half_dim) as f32 / 10_000_f32.powf((i % half_dim) as f32 / half_dim as f32);
    RotaryTable {
        cos: (0..ROWS * half_dim).map(|i| angle(i).cos()).collect(),
        sin: (0..ROWS * half_dim).map(|i| angle(i).sin()).collect(),
        half_dim,
    }
}

/// Part `part` (q, k or v) of the fused rows: `[heads, rows, dim]`.
fn part(qkv: &[f32], part: usize) -> Tensor {
    let all = tensor(qkv, &[ROWS, 3 * HEADS, DIM]);
    let own = all.narrow(1, part * HEADS, HEADS).unwrap();
    own.transpose(0, 1).unwrap().contiguous().unwrap()
}

#[test]
fn rotation_and_attention_agree() {
    let kv_of_head = (0..HEADS).collect();
    let layout = HeadLayout { heads: HEADS, kv_heads: HEADS, head_dim: DIM, kv_of_head };
    let mut qkv: Vec<f32> = noise(ROWS * layout.row_len(), 5).iter().map(|x| x * 2.0).collect();
    let (team, table) = (Team::new(2), rotary());
    let angles = |x: &[f32]| tensor(x, &[ROWS, DIM / 2]);
    let rope = |x: &Tensor| {
        let x = x.unsqueeze(0).unwrap();
        candle_nn::rotary_emb::rope(&x, &angles(&table.cos), &angles(&table.sin))
            .unwrap()
            .squeeze(0)
            .unwrap()
    };
    let (q, k, v) = (rope(&part(&qkv, 0)), rope(&part(&qkv, 1)), part(&qkv, 2));

    let mut pages = KvPages::new(5, HEADS, DIM, Storage::F32);
    let sequence =
        [SequenceRows { first_row: 0, rows: ROWS, context_len: ROWS, blocks: &[3, 1, 4, 0] }];
    rotate_and_append(&team, &mut qkv, &layout, &table, &sequence, &mut pages);
    check("rotated q", &values(&part(&qkv, 0)), &q, 1e-6);
    check("rotated k", &values(&part(&qkv, 1)), &k, 1e-6);

    let scale = (DIM as f32).sqrt().recip();
    let mut ours = vec![f32::NAN; ROWS * HEADS * DIM];
    paged_attention(&team, &qkv, &layout, scale, None, &sequence, &pages, &mut ours);
    let hidden = |i: usize| if i % ROWS > i / ROWS { f32::NEG_INFINITY } else { 0.0 };
    let causal: Vec<f32> = (0..ROWS * ROWS).map(hidden).collect();
    let scores = (q.matmul(&k.t().unwrap()).unwrap() * f64::from(scale)).unwrap();
    let scores = scores.broadcast_add(&tensor(&causal, &[ROWS, ROWS])).unwrap();
    let theirs = candle_nn::ops::softmax(&scores, D::Minus1).unwrap().matmul(&v).unwrap();
    check("attention", &ours, &theirs.transpose(0, 1).unwrap().contiguous().unwrap(), 2e-5);
}
