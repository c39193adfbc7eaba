//! Attention over pages: which kernel takes which rows.

use std::sync::Arc;

use super::{
    context::Context,
    error::CudaError,
    memory::Memory,
    step_inputs::StepInputs,
    stream::{Shape, Stream},
    tensor::{Element, Pages, Tensor},
    tensor_map::TensorMap,
};
use crate::HeadLayout;

/// Blocks of decode attention that fill a GPU; sequences are split until there are so many.
const DECODE_BLOCKS: usize = 512;
const SPLITS_MAX: usize = 32;
/// Query heads of one tile of decode attention.
const TILE_HEADS: usize = 16;
const TILES_MAX: usize = 64;
const HEADS_MAX: usize = 256;
const HEAD_DIM_MAX: usize = 512;

/// How scores are made of products.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scoring {
    /// Factor on the product of query and key.
    pub scale: f32,
    /// `cap * tanh(score / cap)`; 0: none.
    pub soft_cap: f32,
    /// A position sees so many last ones, its own among them; 0: all.
    pub window: i32,
}

/// Query heads that share a KV head, at most 16 a tile.
#[derive(Clone, Copy)]
#[repr(C)]
struct HeadTiles {
    kv_head: [u16; TILES_MAX],
    first_head: [u16; TILES_MAX],
    count: [u16; TILES_MAX],
}

/// Partial sums of split sequences, and how many splits have arrived.
pub(super) struct Scratch {
    partial: Memory,
    arrivals: Memory,
}

impl Scratch {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let bytes = DECODE_BLOCKS * TILE_HEADS * (256 + 2) * 4;
        Ok(Self {
            partial: Memory::new(context, bytes, "attention")?,
            arrivals: Memory::new(context, DECODE_BLOCKS * 4, "attention")?,
        })
    }
}

fn shape_error(detail: String) -> CudaError {
    CudaError::Shape { what: "paged_attention", detail }
}

/// The tiles of a layout, and how many.
fn head_tiles(layout: &HeadLayout) -> Result<(HeadTiles, usize), CudaError> {
    let mut tiles =
        HeadTiles { kv_head: [0; TILES_MAX], first_head: [0; TILES_MAX], count: [0; TILES_MAX] };
    let mut used = 0usize;
    for (head, &kv_head) in layout.kv_of_head.iter().enumerate() {
        let last = used.checked_sub(1).filter(|&last| {
            usize::from(tiles.kv_head[last]) == kv_head
                && usize::from(tiles.count[last]) < TILE_HEADS
        });
        if let Some(last) = last {
            tiles.count[last] += 1;
            continue;
        }
        if used == TILES_MAX {
            return Err(shape_error(format!("more than {TILES_MAX} tiles of heads: {layout:?}")));
        }
        (tiles.kv_head[used], tiles.first_head[used], tiles.count[used]) =
            (kv_head as u16, head as u16, 1);
        used += 1;
    }
    Ok((tiles, used))
}

impl Stream {
    /// Causal attention of every row over its own sequence's pages.
    ///
    /// # Errors
    /// If a shape does not fit, or a launch fails.
    pub fn paged_attention(
        &mut self,
        qkv: &Tensor,
        layout: &HeadLayout,
        scoring: Scoring,
        inputs: &StepInputs,
        rows: usize,
        pages: &Pages,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        qkv.require("paged_attention", rows)?;
        out.require("paged_attention", rows)?;
        let fits = qkv.width == layout.row_len()
            && out.width == layout.heads * layout.head_dim
            && (qkv.element, pages.element) == (out.element, out.element)
            && (pages.kv_heads, pages.head_dim) == (layout.kv_heads, layout.head_dim)
            && layout.kv_of_head.len() == layout.heads
            && layout.kv_of_head.iter().all(|&head| head < layout.kv_heads)
            && layout.heads <= HEADS_MAX
            && layout.head_dim <= HEAD_DIM_MAX
            && inputs.block_count() <= pages.num_blocks
            && rows == inputs.row_count();
        if !fits {
            return Err(shape_error(format!("{layout:?}, {rows} rows, width {}", qkv.width)));
        }
        let call = Call { qkv, layout, scoring, inputs, pages, out };
        // The tensor-core kernels keep a stretch of keys and values in shared memory.
        let tiled = [64, 128, 256].contains(&layout.head_dim)
            && self.context.has_shared(4 * 3 * 64 * layout.head_dim);
        if out.element == Element::F32 || !tiled {
            return self.plain_attention(&call, rows);
        }
        if inputs.decode_count() > 0 {
            self.decode_attention(&call)?;
        }
        if inputs.work_count() > 0 { self.prefill_attention(&call) } else { Ok(()) }
    }

    fn decode_attention(&self, call: &Call<'_>) -> Result<(), CudaError> {
        let Call { qkv, layout, scoring, inputs, pages, out } = call;
        let (tiles, tile_count) = head_tiles(layout)?;
        let sequences = inputs.decode_count();
        let splits = (DECODE_BLOCKS / (sequences * tile_count)).clamp(1, SPLITS_MAX);
        let shape = Shape {
            grid: (tile_count, splits, sequences),
            threads: 128,
            shared_bytes: 4 * 3 * 64 * layout.head_dim,
        };
        let kernel = match layout.head_dim {
            64 => "attention_decode_64",
            128 => "attention_decode_128",
            _ => "attention_decode_256",
        };
        // SAFETY: the kernel's parameters. Shapes were checked; tables name blocks that the pages
        // have; partial sums have room for DECODE_BLOCKS blocks of TILE_HEADS heads, and several
        // splits are launched within that number alone.
        unsafe {
            self.launch(
                kernel,
                &shape,
                &[
                    &qkv.memory.address(),
                    &(qkv.width as i32),
                    &pages.memory.address(),
                    &(layout.kv_heads as i32),
                    &(layout.heads as i32),
                    &inputs.sequences(),
                    &inputs.tables(),
                    &tiles,
                    scoring,
                    &self.attention.partial.address(),
                    &self.attention.arrivals.address(),
                    &out.memory.address(),
                ],
            )
        }
    }

    fn prefill_attention(&self, call: &Call<'_>) -> Result<(), CudaError> {
        let Call { qkv, layout, scoring, inputs, pages, out } = call;
        if let Some(map) = &pages.map {
            return self.prefill_attention_in_bulk(call, map);
        }
        let (kernel, threads) = match layout.head_dim {
            64 => ("attention_prefill_64", 128),
            128 => ("attention_prefill_128", 128),
            _ => ("attention_prefill_256", 256),
        };
        let shape = Shape {
            grid: (inputs.work_count(), layout.heads, 1),
            threads,
            shared_bytes: (128 + 4 * 64) * 2 * layout.head_dim,
        };
        // SAFETY: the kernel's parameters; work items name rows of the step's sequences.
        unsafe {
            self.launch(
                kernel,
                &shape,
                &[
                    &qkv.memory.address(),
                    &(qkv.width as i32),
                    &pages.memory.address(),
                    &(layout.kv_heads as i32),
                    &(layout.heads as i32),
                    &inputs.sequences(),
                    &inputs.tables(),
                    &inputs.work(),
                    &kv_of_head(layout),
                    scoring,
                    &out.memory.address(),
                ],
            )
        }
    }

    /// On Hopper: blocks that stay, one a multiprocessor, and pages copied by the copy engine.
    fn prefill_attention_in_bulk(&self, call: &Call<'_>, map: &TensorMap) -> Result<(), CudaError> {
        let Call { qkv, layout, scoring, inputs, out, .. } = call;
        let kernel = match layout.head_dim {
            64 => "attention_prefill_hopper_64",
            _ => "attention_prefill_hopper_128",
        };
        let items = inputs.work_count() * layout.heads;
        let shape = Shape {
            grid: (items.min(self.context.multiprocessors), 1, 1),
            threads: 384,
            shared_bytes: 5 * 128 * 2 * layout.head_dim + 64,
        };
        // SAFETY: the kernel's parameters; work items name rows of the step's sequences, and the map
        // is that of the pages, of this head size.
        unsafe {
            self.launch(
                kernel,
                &shape,
                &[
                    &qkv.memory.address(),
                    &(qkv.width as i32),
                    map,
                    &(layout.kv_heads as i32),
                    &(layout.heads as i32),
                    &inputs.sequences(),
                    &inputs.tables(),
                    &inputs.work(),
                    &(items as i32),
                    &kv_of_head(layout),
                    scoring,
                    &out.memory.address(),
                ],
            )
        }
    }

    fn plain_attention(&self, call: &Call<'_>, rows: usize) -> Result<(), CudaError> {
        let Call { qkv, layout, scoring, inputs, pages, out } = call;
        let kernel = match out.element {
            Element::F32 => "attention_plain_f32",
            Element::Bf16 => "attention_plain_bf16",
        };
        let shape = Shape {
            grid: (rows, layout.heads, 1),
            threads: 128,
            shared_bytes: 4 * (layout.head_dim + 2) * 4,
        };
        // SAFETY: the kernel's parameters; every row has a sequence with a table for its position.
        unsafe {
            self.launch(
                kernel,
                &shape,
                &[
                    &qkv.memory.address(),
                    &(qkv.width as i32),
                    &pages.memory.address(),
                    &(layout.kv_heads as i32),
                    &(layout.heads as i32),
                    &(layout.head_dim as i32),
                    &inputs.rows(),
                    &inputs.sequences(),
                    &inputs.tables(),
                    &kv_of_head(layout),
                    scoring,
                    &out.memory.address(),
                ],
            )
        }
    }
}

struct Call<'a> {
    qkv: &'a Tensor,
    layout: &'a HeadLayout,
    scoring: Scoring,
    inputs: &'a StepInputs,
    pages: &'a Pages,
    out: &'a Tensor,
}

/// At most 256 heads of at most 256 KV heads: checked by the caller.
fn kv_of_head(layout: &HeadLayout) -> [u8; HEADS_MAX] {
    let mut table = [0; HEADS_MAX];
    for (to, &kv_head) in table.iter_mut().zip(&layout.kv_of_head) {
        *to = kv_head as u8;
    }
    table
}
