//! The gated activation of the MLP (SwiGLU and GEGLU: Shazeer 2020, arXiv:2002.05202).

use crate::disjoint::Disjoint;
use crate::exponential::exp;
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::team::{Team, share};

/// Below this many values a fork costs more than it saves.
const FORK_VALUES: usize = 8 * 1024;

/// What a gate goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x (1 + tanh u) / 2`, `u = sqrt(2 / pi) (x + 0.044715 x^3)` (Hendrycks & Gimpel 2016,
    /// arXiv:1606.08415).
    GeluTanh,
}

/// `out[r, i] = activation(gate_up[r, i]) * gate_up[r, width + i]`; `gate_up`: `[rows, 2 * width]`,
/// `out`: `[rows, width]`.
///
/// # Panics
/// If a length does not fit.
pub fn gate_mul(
    team: &Team,
    activation: Activation,
    gate_up: &[f32],
    width: usize,
    out: &mut [f32],
) {
    gate_mul_on(Isa::best(), team, activation, gate_up, width, out);
}

fn gate_mul_on(
    isa: Isa,
    team: &Team,
    activation: Activation,
    gate_up: &[f32],
    width: usize,
    out: &mut [f32],
) {
    assert!(gate_up.len() == 2 * out.len(), "{} values in, {} out", gate_up.len(), out.len());
    if out.is_empty() {
        return;
    }
    assert!(width > 0 && out.len().is_multiple_of(width), "{} values, rows of {width}", out.len());
    let all = Disjoint::new(out);
    let len = gate_up.len() / 2;
    // Shares of whole vectors within the flat output: one row is split as well as many.
    let work = |values: std::ops::Range<usize>| {
        let mut next = values.start;
        while next < values.end {
            let (row, column) = (next / width, next % width);
            let end = values.end.min((row + 1) * width);
            let gate = row * 2 * width + column;
            // SAFETY: each value is written by the one worker whose share holds it.
            let out = unsafe { all.part(next..end) };
            let up = gate + width;
            let n = out.len();
            let (gate, up) = (&gate_up[gate..gate + n], &gate_up[up..up + n]);
            match activation {
                Activation::Silu => isa.run(GateMul::<false> { gate, up, out }),
                Activation::GeluTanh => isa.run(GateMul::<true> { gate, up, out }),
            }
            next = end;
        }
    };
    if len < FORK_VALUES {
        work(0..len);
    } else {
        team.run(&|worker| work(share(len, LANES, worker, team.threads())));
    }
}

struct GateMul<'a, const GELU: bool> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl<const GELU: bool> Kernel for GateMul<'_, GELU> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            s.store(gate_mul_lanes::<S, GELU>(s, gate, up), out);
        }
        // The same lanes, padded: a value's result does not depend on where a share ends.
        let (mut gate, mut up, mut out) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        gate[..gate_tail.len()].copy_from_slice(gate_tail);
        up[..up_tail.len()].copy_from_slice(up_tail);
        s.store(gate_mul_lanes::<S, GELU>(s, &gate, &up), &mut out);
        out_tail.copy_from_slice(&out[..out_tail.len()]);
    }
}

/// `gate / (1 + exp(-v)) * up`: `v` is the gate itself for SiLU, `2 u` for GELU, since
/// `(1 + tanh u) / 2 = 1 / (1 + exp(-2 u))`.
#[inline(always)]
fn gate_mul_lanes<S: Simd, const GELU: bool>(s: S, gate: &[f32; LANES], up: &[f32; LANES]) -> S::V {
    /// `2 sqrt(2 / pi)`.
    const SLOPE: f32 = 1.595_769;
    let (gate, up) = (s.load(gate), s.load(up));
    let v = if GELU {
        let square = s.mul(gate, gate);
        let factor = s.fma(square, s.splat(SLOPE * 0.044_715), s.splat(SLOPE));
        s.mul(gate, factor)
    } else {
        gate
    };
    let e = exp(s, s.sub(s.splat(0.0), v));
    s.mul(s.div(gate, s.add(s.splat(1.0), e)), up)
}

#[cfg(test)]
mod tests;
