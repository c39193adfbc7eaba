//! Matrix products: cuBLASLt for many rows, kernels of our own for few, whichever was measured to be
//! faster.

use cudarc::driver::sys;

use super::{
    blas::{FLUSH_BYTES, Key},
    error::{CudaError, check},
    event::Event,
    stream::{Parameter, Shape, Stream},
    tensor::{Element, Matrix, Tensor, Vector},
};
use crate::Activation;

/// Above so many rows, products of a class of sizes are done alike.
const LARGE_ROWS: usize = 512;
const MEASURED_RUNS: usize = 5;
const WARPS: usize = 8;

/// A kernel of `cuda/linear.cu`: tiles of 16 outputs and of 8 rows, and the depth of its queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Skinny {
    tiles: usize,
    pub(super) columns: usize,
    stages: usize,
}

pub(super) const SKINNY: [Skinny; 7] = [
    Skinny { tiles: 1, columns: 1, stages: 8 },
    Skinny { tiles: 1, columns: 1, stages: 5 },
    Skinny { tiles: 1, columns: 2, stages: 6 },
    Skinny { tiles: 1, columns: 4, stages: 8 },
    Skinny { tiles: 2, columns: 1, stages: 5 },
    Skinny { tiles: 2, columns: 2, stages: 8 },
    Skinny { tiles: 2, columns: 4, stages: 6 },
];

#[derive(Clone, Copy, Debug)]
pub(super) enum Product {
    Skinny(Skinny),
    /// The number of an algorithm of the plan.
    Blas(usize),
}

/// How a gated product is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gated {
    Fused(Skinny),
    Split,
}

/// The rows that a product is done for: a few more than are asked for, so that there are not too many
/// sizes to be measured. Steps are recorded for these sizes.
pub fn product_rows(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=128 => rows.next_multiple_of(16),
        129..=LARGE_ROWS => rows.next_multiple_of(32),
        _ => rows.next_multiple_of(64),
    }
}

/// The sizes from `least` to `most` rows that products are measured for: each up to 512, then doubled.
pub fn measured_rows(least: usize, most: usize) -> Vec<usize> {
    let small = (least..=most.min(LARGE_ROWS)).map(product_rows);
    let large = (0..).map(|doublings| (2 * LARGE_ROWS) << doublings);
    let sizes = small.chain(large.take_while(|rows| *rows < most).filter(|rows| *rows >= least));
    let mut sizes: Vec<usize> = sizes.chain([most]).map(|rows| rows.min(most)).collect();
    sizes.dedup();
    sizes
}

/// Sizes of a class are done by what was measured for its largest.
fn class_rows(rows: usize) -> usize {
    if rows > LARGE_ROWS { rows.next_power_of_two() } else { rows }
}

/// One product, its shapes checked.
struct Call<'a> {
    key: Key,
    class: Key,
    x: &'a Tensor,
    w: &'a Matrix,
    bias: Option<&'a Vector>,
}

impl Stream {
    /// `out = x · wᵀ + bias`.
    ///
    /// # Errors
    /// If a shape does not fit, or a launch fails.
    pub fn linear(
        &mut self,
        x: &Tensor,
        rows: usize,
        w: &Matrix,
        bias: Option<&Vector>,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        x.require("linear", rows)?;
        out.require("linear", rows)?;
        let fits = x.width == w.inputs
            && out.width == w.outputs
            && x.element == w.element
            && bias.is_none_or(|bias| bias.len == w.outputs);
        if !fits {
            let detail = format!("{} -> {} by {}x{}", x.width, out.width, w.outputs, w.inputs);
            return Err(CudaError::Shape { what: "linear", detail });
        }
        if rows == 0 {
            return Ok(());
        }
        // What the rows behind are made of does not matter.
        let room = x.rows.min(out.rows);
        let (outputs, inputs, element) = (w.outputs, w.inputs, w.element);
        let rows = product_rows(rows).min(room);
        let key = Key { rows, outputs, inputs, element, out: out.element };
        let class = Key { rows: class_rows(rows).min(room), ..key };
        let call = Call { key, class, x, w, bias };
        let product = self.product(&call, out)?;
        self.run_product(product, &call, out)
    }

    /// `out = activation(gate) * up`, `w` being gate rows, then up rows. `gate_up` is scratch.
    ///
    /// # Errors
    /// If a shape does not fit, or a launch fails.
    pub fn gated_linear(
        &mut self,
        activation: Activation,
        x: &Tensor,
        rows: usize,
        (w, bias): (&Matrix, Option<&Vector>),
        gate_up: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let (outputs, inputs, element) = (w.outputs / 2, w.inputs, w.element);
        let padded = product_rows(rows).min(x.rows.min(out.rows));
        let key = Key { rows: padded, outputs, inputs, element, out: out.element };
        let candidates = self.skinny(&key);
        let fits = x.width == inputs && out.width == outputs && x.element == element;
        if activation != Activation::Silu || bias.is_some() || candidates.is_empty() || !fits {
            self.linear(x, rows, w, bias, gate_up)?;
            return self.gate_mul(activation, gate_up, rows, out);
        }
        x.require("gated_linear", rows)?;
        out.require("gated_linear", rows)?;
        let call = Call { key, class: key, x, w, bias: None };
        let known = self.blas.gated.get(&key).copied();
        let gated = match known {
            Some(gated) => gated,
            None if !self.measuring => Gated::Split,
            None => self.measure_gated(&candidates, &call, gate_up, out)?,
        };
        self.run_gated(gated, &call, gate_up, out)
    }

    fn run_gated(
        &mut self,
        gated: Gated,
        call: &Call<'_>,
        gate_up: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        match gated {
            Gated::Fused(skinny) => self.launch_skinny(skinny, call, out, true),
            Gated::Split => {
                self.linear(call.x, call.key.rows, call.w, None, gate_up)?;
                self.gate_mul(Activation::Silu, gate_up, call.key.rows, out)
            }
        }
    }

    fn measure_gated(
        &mut self,
        candidates: &[Skinny],
        call: &Call<'_>,
        gate_up: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<Gated, CudaError> {
        // Settles how the split product is done before it is measured.
        self.run_gated(Gated::Split, call, gate_up, out)?;
        let mut best = (Gated::Split, f32::INFINITY);
        let ways = candidates.iter().map(|&skinny| Gated::Fused(skinny));
        for gated in ways.chain([Gated::Split]) {
            let time = self.measure(&mut |stream| stream.run_gated(gated, call, gate_up, out))?;
            if time < best.1 {
                best = (gated, time);
            }
        }
        self.blas.gated.insert(call.key, best.0);
        Ok(best.0)
    }

    /// Our kernels that can do a product.
    fn skinny(&self, key: &Key) -> Vec<Skinny> {
        let fits = |skinny: &&Skinny| {
            key.element == Element::Bf16
                && key.inputs.is_multiple_of(64)
                && key.rows <= 8 * skinny.columns
                && key.rows > 8 * skinny.columns / 2 * usize::from(skinny.columns > 1)
                && self.context.has_shared(skinny.shared_bytes())
        };
        SKINNY.iter().filter(fits).copied().collect()
    }

    /// The fastest way to do a product: measured during the warm-up.
    fn product(&mut self, call: &Call<'_>, out: &mut Tensor) -> Result<Product, CudaError> {
        if let Some(product) = self.blas.products.get(&call.class) {
            return Ok(*product);
        }
        let plan = self.blas.plan(call.key, call.class)?;
        let skinny = self.skinny(&call.key).into_iter().map(Product::Skinny);
        let blas = (0..plan.algorithms.len()).map(Product::Blas);
        let ways: Vec<Product> = skinny.chain(blas).collect();
        let Some(first) = ways.first().copied() else {
            let text = format!("no algorithm for {:?}", call.key);
            return Err(CudaError::Blas { call: "cublasLtMatmulAlgoGetHeuristic", text });
        };
        if !self.measuring || call.key != call.class {
            return Ok(first);
        }
        let mut best = (first, f32::INFINITY);
        for product in ways {
            let time = self.measure(&mut |stream| stream.run_product(product, call, out))?;
            if time < best.1 {
                best = (product, time);
            }
        }
        self.blas.products.insert(call.class, best.0);
        Ok(best.0)
    }

    fn run_product(
        &mut self,
        product: Product,
        call: &Call<'_>,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let algorithm = match product {
            Product::Skinny(skinny) => return self.launch_skinny(skinny, call, out, false),
            Product::Blas(algorithm) => algorithm,
        };
        self.blas_product(algorithm, (call.key, call.class), (call.x, call.w), out)?;
        match call.bias {
            Some(bias) => self.add_bias(out, call.key.rows, bias),
            None => Ok(()),
        }
    }

    /// A product by one kernel, whatever was measured.
    #[cfg(test)]
    pub(super) fn linear_by(
        &mut self,
        skinny: Skinny,
        x: &Tensor,
        rows: usize,
        w: &Matrix,
        bias: Option<&Vector>,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let (outputs, inputs, element) = (w.outputs, w.inputs, w.element);
        let key = Key { rows, outputs, inputs, element, out: out.element };
        self.launch_skinny(skinny, &Call { key, class: key, x, w, bias }, out, false)
    }

    /// A gated product by one kernel, whatever was measured.
    #[cfg(test)]
    pub(super) fn gated_by(
        &mut self,
        skinny: Skinny,
        x: &Tensor,
        rows: usize,
        w: &Matrix,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let (outputs, inputs, element) = (w.outputs / 2, w.inputs, w.element);
        let key = Key { rows, outputs, inputs, element, out: out.element };
        self.launch_skinny(skinny, &Call { key, class: key, x, w, bias: None }, out, true)
    }

    fn launch_skinny(
        &self,
        skinny: Skinny,
        call: &Call<'_>,
        out: &Tensor,
        gated: bool,
    ) -> Result<(), CudaError> {
        let Skinny { tiles, columns, stages } = skinny;
        let kept = if gated { 8 } else { 16 } * tiles;
        let kind = match (gated, out.element) {
            (true, _) => "gated_",
            (false, Element::F32) => "f32_",
            (false, Element::Bf16) => "",
        };
        let kernel = format!("linear_{kind}{tiles}_{columns}_{stages}");
        let shape = Shape {
            grid: (call.key.outputs.div_ceil(kept), 1, 1),
            threads: 32 * WARPS,
            shared_bytes: skinny.shared_bytes(),
        };
        let bias = call.bias.map_or(0, |bias| bias.memory.address());
        // SAFETY: the kernel's parameters; shapes were checked, and `skinny` found that the kernel
        // takes so many rows and such inputs.
        unsafe {
            let parameters: [&dyn Parameter; 7] = [
                &call.w.memory.address(),
                &call.x.memory.address(),
                &bias,
                &out.memory.address(),
                &(call.key.rows as i32),
                &(call.key.outputs as i32),
                &(call.key.inputs as i32),
            ];
            self.launch(&kernel, &shape, &parameters)
        }
    }

    /// Median time of `work` in ms, with cold caches.
    fn measure(
        &mut self,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<f32, CudaError> {
        work(self)?;
        let mut times = [0.0; MEASURED_RUNS];
        let (start, end) = (Event::new(self)?, Event::new(self)?);
        for time in &mut times {
            // SAFETY: an allocation of this length.
            unsafe {
                let flush = self.blas.flush.address();
                let code = sys::cuMemsetD8Async(flush, 1, FLUSH_BYTES, self.raw);
                check("cuMemsetD8Async", code)?;
            }
            start.record(self)?;
            work(self)?;
            end.record(self)?;
            *time = end.since(&start)?;
        }
        times.sort_by(f32::total_cmp);
        Ok(times[MEASURED_RUNS / 2])
    }

    /// From here on products that are new are measured.
    pub fn begin_measuring(&mut self) {
        self.measuring = true;
    }

    /// From here on they are not.
    pub fn end_measuring(&mut self) {
        self.measuring = false;
    }
}

impl Skinny {
    fn shared_bytes(self) -> usize {
        WARPS * self.stages * (2 * self.tiles + self.columns) * 512
    }
}
