//! Mixtures of experts: the host sends rows to experts, the GPU computes them expert by expert.

use trireme_collectives::CollectiveError;
use trireme_kernels::{
    Routing,
    cuda::{Tensor, WeightedRows},
};

use super::{Cuda, done};
use crate::layers::mixture::{ExpertBuffers, Experts};

/// Which rows go where, from step to step.
#[derive(Default)]
pub(super) struct Expertise {
    routing: Routing,
    rows: Option<WeightedRows>,
    /// A mixture was computed: steps wait for the host, and cannot be recorded.
    pub(super) is_used: bool,
}

impl Cuda {
    /// What the router says of each row, the same on all ranks of the stage: kernels of another rank may
    /// differ in the last bits, and choose other experts.
    fn router_logits(&mut self, logits: &Tensor, rows: usize) -> Result<Vec<f32>, CollectiveError> {
        let mut values = done(self.stream.read_rows(logits, 0..rows));
        if self.hosts.tensor_ranks() > 1 {
            self.check_groups()?;
            self.hosts
                .run(|world| world.tensor.broadcast(0, bytemuck::cast_slice_mut(&mut values)))?;
        }
        Ok(values)
    }

    pub(super) fn mix(
        &mut self,
        x: &Tensor,
        rows: usize,
        experts: &Experts<Self>,
        buffers: &mut ExpertBuffers<Self>,
        out: &mut Tensor,
    ) -> Result<(), CollectiveError> {
        let count = experts.gate_up.len();
        let logits = self.router_logits(&buffers.logits, rows)?;
        let Self { stream, expertise: Expertise { routing, rows: list, is_used }, .. } = self;
        *is_used = true;
        routing.choose(&logits, count, experts.per_token, experts.renormalise);
        let needed = rows * experts.per_token;
        let list = match list {
            Some(list) if list.capacity() >= needed => list,
            list => list.insert(done(WeightedRows::new(stream.context(), needed))),
        };
        let (mut all_rows, mut weights) = (Vec::with_capacity(needed), Vec::with_capacity(needed));
        for expert in 0..count {
            all_rows.extend(routing.rows_of(expert).iter().map(|&row| row as u32));
            weights.extend_from_slice(routing.weights_of(expert));
        }
        done(list.fill(&all_rows, &weights));
        let ExpertBuffers { input, gate_up, inner, output, sum, .. } = buffers;
        done(stream.clear(sum, rows));
        let mut start = 0;
        for (expert, (gate_up_w, down)) in experts.gate_up.iter().zip(&experts.down).enumerate() {
            let rows = routing.rows_of(expert).len();
            let range = start..start + rows;
            start = range.end;
            if rows == 0 {
                continue;
            }
            done(stream.take_rows(x, list, range.clone(), input));
            let activation = experts.activation;
            done(stream.gated_linear(activation, input, rows, (gate_up_w, None), gate_up, inner));
            done(stream.linear(inner, rows, down, None, output));
            done(stream.add_weighted(output, list, range, sum));
        }
        done(stream.round(sum, rows, out));
        Ok(())
    }
}
