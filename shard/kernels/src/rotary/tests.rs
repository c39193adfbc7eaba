use super::*;
use crate::matrix::Storage;
use crate::samples::{distance, noise};

fn table(positions: usize, half_dim: usize) -> RotaryTable {
    let angles: Vec<f32> = (0..positions * half_dim)
        .map(|i| (i / half_dim) as f32 / 10_000_f32.powf((i % half_dim) as f32 / half_dim as f32))
        .collect();
    RotaryTable {
        cos: angles.iter().map(|a| a.cos()).collect(),
        sin: angles.iter().map(|a| a.sin()).collect(),
        half_dim,
    }
}

fn layout(heads: usize, kv_heads: usize, head_dim: usize) -> HeadLayout {
    let kv_of_head = (0..heads).map(|head| head * kv_heads / heads).collect();
    HeadLayout { heads, kv_heads, head_dim, kv_of_head }
}

/// Reads (k, v) of a token back from the pages.
fn stored(pages: &KvPages, block: usize, token: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
    let geometry = pages.geometry();
    let dims = 0..geometry.head_dim;
    let (k, v) = (geometry.k_page(block, head), geometry.v_page(block, head));
    match pages.data() {
        PageData::F32(data) => (
            dims.clone().map(|d| data[k + Geometry::k_offset::<f32>(token, d)]).collect(),
            dims.map(|d| data[v + Geometry::v_offset::<f32>(token, d)]).collect(),
        ),
        PageData::Bf16(data) => (
            dims.clone()
                .map(|d| data[k + Geometry::k_offset::<half::bf16>(token, d)].to_f32())
                .collect(),
            dims.map(|d| data[v + Geometry::v_offset::<half::bf16>(token, d)].to_f32()).collect(),
        ),
    }
}

/// Rotation in f64 of one head at one position.
fn rotated(x: &[f32], rotary: &RotaryTable, position: usize) -> Vec<f32> {
    let half = rotary.half_dim;
    let mut out = x.to_vec();
    for i in 0..half {
        let (cos, sin) = (rotary.cos[position * half + i], rotary.sin[position * half + i]);
        let (a, b, cos, sin) =
            (f64::from(x[i]), f64::from(x[i + half]), f64::from(cos), f64::from(sin));
        out[i] = (a * cos - b * sin) as f32;
        out[i + half] = (b * cos + a * sin) as f32;
    }
    out
}

fn check(isa: Isa, threads: usize, layout: &HeadLayout, half_dim: usize, storage: Storage) {
    let (dim, len) = (layout.head_dim, layout.row_len());
    let rotary = table(64, half_dim);
    let before = noise(12 * len, 31);
    let mut qkv = before.clone();
    let mut pages = KvPages::new(6, layout.kv_heads, dim, storage);
    // Row 5 belongs to nobody; the second sequence crosses a block border.
    let sequences = [
        SequenceRows { first_row: 0, rows: 5, context_len: 5, blocks: &[4] },
        SequenceRows { first_row: 6, rows: 6, context_len: 35, blocks: &[0, 5, 2] },
    ];
    let append = Append { isa, layout, rotary: &rotary, sequences: &sequences };
    append.run(&Team::new(threads), &mut qkv, &mut pages);
    assert_eq!(qkv[5 * len..6 * len], before[5 * len..6 * len], "a row of nobody is left alone");
    let tolerance = if storage == Storage::F32 { 2e-7 } else { 4e-3 };
    for s in &sequences {
        for row in 0..s.rows {
            let position = s.context_len - s.rows + row;
            let start = (s.first_row + row) * len;
            let (old, new) = (&before[start..start + len], &qkv[start..start + len]);
            let turned = layout.heads + layout.kv_heads;
            for head in 0..turned {
                let part = head * dim..(head + 1) * dim;
                let want = rotated(&old[part.clone()], &rotary, position);
                assert!(distance(&new[part], &want) < 2e-7, "{} head {head}", isa.name());
            }
            assert_eq!(new[turned * dim..], old[turned * dim..], "v is not rotated");
            for head in 0..layout.kv_heads {
                let (k, v) = stored(&pages, s.blocks[position / 16] as usize, position % 16, head);
                let own = |base: usize| (base + head) * dim..(base + head + 1) * dim;
                assert!(distance(&k, &new[own(layout.heads)]) <= tolerance);
                assert!(distance(&v, &new[own(turned)]) <= tolerance);
            }
        }
    }
}

#[test]
fn rotates_and_stores_every_row() {
    for isa in Isa::all() {
        for threads in [1, 3] {
            for storage in [Storage::F32, Storage::Bf16] {
                check(isa, threads, &layout(9, 3, 64), 32, storage);
                check(isa, threads, &layout(4, 1, 18), 9, storage);
                // Only part of each head is rotated.
                check(isa, threads, &layout(2, 2, 80), 16, storage);
                check(isa, threads, &layout(16, 8, 128), 64, storage);
            }
        }
    }
}

fn refused(context_len: usize, blocks: &[u32], first_row: usize) {
    let layout = layout(2, 1, 8);
    let mut qkv = vec![0.0; 2 * layout.row_len()];
    let mut pages = KvPages::new(2, 1, 8, Storage::F32);
    let sequences = [SequenceRows { first_row, rows: 1, context_len, blocks }];
    rotate_and_append(&Team::new(1), &mut qkv, &layout, &table(20, 4), &sequences, &mut pages);
}

#[test]
#[should_panic(expected = "block 2 of 2")]
fn a_block_outside_is_refused() {
    refused(3, &[2], 0);
}

#[test]
#[should_panic(expected = "1 blocks for 17 tokens")]
fn a_short_table_is_refused() {
    refused(17, &[0], 0);
}

#[test]
#[should_panic(expected = "row 3 of 2")]
fn a_row_outside_is_refused() {
    refused(1, &[0], 2);
}

#[test]
#[should_panic(expected = "rotary table too short for 21 positions")]
fn a_position_outside_is_refused() {
    refused(21, &[0, 1], 0);
}
