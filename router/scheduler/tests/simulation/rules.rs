//! What a plan may ask for, seen from outside the scheduler.

use std::collections::{BTreeMap, VecDeque};

use trireme_scheduler::{Limits, Plan, SequenceId};

use crate::shard::Shard;

/// A plan that the shard has not done yet, with the block tables of whom it names.
pub struct Pending {
    pub plan: Plan,
    tables: Vec<Vec<u32>>,
}

struct Table {
    blocks: Vec<u32>,
    is_prefilling: bool,
}

/// Follows what the shards were told.
pub struct Rules {
    limits: Limits,
    tables: BTreeMap<SequenceId, Table>,
    /// By block: tables it is in.
    held: Vec<u32>,
    /// By block: steps in flight that may touch it.
    busy: Vec<u32>,
    pub pending: VecDeque<Pending>,
    last_step: u64,
}

impl Rules {
    pub fn new(limits: Limits) -> Self {
        Self {
            held: vec![0; limits.num_blocks],
            busy: vec![0; limits.num_blocks],
            tables: BTreeMap::new(),
            pending: VecDeque::new(),
            last_step: 0,
            limits,
        }
    }

    /// Panics when the plan breaks a rule. `shard` has done every step whose result is known.
    pub fn take(&mut self, plan: Plan, shard: &Shard) {
        self.last_step += 1;
        assert_eq!(plan.step_id, self.last_step);
        self.check_budget(&plan);
        for id in &plan.drop {
            let table = self.tables.remove(id).expect("a drop of a sequence the shards know");
            table.blocks.iter().for_each(|block| self.held[*block as usize] -= 1);
        }
        for admit in &plan.admit {
            let table = Table { blocks: Vec::new(), is_prefilling: true };
            assert!(self.tables.insert(admit.id, table).is_none());
        }
        assert!(self.tables.len() <= self.limits.max_sequences);
        self.check_blocks(&plan, shard);
        self.check_lag(&plan);
        let named = plan.chunks.iter().map(|chunk| chunk.id).chain(plan.decode.iter().copied());
        let tables: Vec<Vec<u32>> = named.map(|id| self.tables[&id].blocks.clone()).collect();
        tables.iter().flatten().for_each(|block| self.busy[*block as usize] += 1);
        self.pending.push_back(Pending { plan, tables });
        assert!(self.pending.len() <= self.limits.max_steps_in_flight);
    }

    /// The oldest plan, whose result comes now.
    pub fn pop(&mut self) -> Option<Plan> {
        let pending = self.pending.pop_front()?;
        pending.tables.iter().flatten().for_each(|block| self.busy[*block as usize] -= 1);
        Some(pending.plan)
    }

    fn check_budget(&mut self, plan: &Plan) {
        let tokens: usize = plan.chunks.iter().map(|chunk| chunk.len).sum();
        assert!(tokens + plan.decode.len() <= self.limits.max_batch_tokens);
        if tokens + plan.decode.len() == 0 {
            assert!(!plan.drop.is_empty() && self.pending.is_empty(), "an idle step");
        }
        // Counted as when planning began: one of these may be preempted for another's sake.
        let decoding = self.tables.values().filter(|table| !table.is_prefilling);
        let spread = self.limits.stages.min(self.limits.max_steps_in_flight);
        assert!(plan.decode.len() <= decoding.count().div_ceil(spread));
    }

    fn check_blocks(&mut self, plan: &Plan, shard: &Shard) {
        for (id, blocks) in &plan.blocks {
            let admit = plan.admit.iter().find(|admit| admit.id == *id);
            let chunk = plan.chunks.iter().find(|chunk| chunk.id == *id);
            let cached_tokens = admit.and(chunk).map_or(0, |chunk| chunk.start);
            assert_eq!(cached_tokens % self.limits.block_tokens, 0);
            let (cached, fresh) = blocks.split_at(cached_tokens / self.limits.block_tokens);
            if let Some(admit) = admit {
                shard.check_cached(&admit.tokens[..cached_tokens], cached);
            }
            for block in fresh {
                assert_eq!(self.held[*block as usize], 0, "block {block} has an owner");
                assert_eq!(self.busy[*block as usize], 0, "block {block} is in use by a step");
            }
            blocks.iter().for_each(|block| self.held[*block as usize] += 1);
            let table = self.tables.get_mut(id).expect("blocks of a known sequence");
            table.blocks.extend(blocks);
        }
        assert!(plan.blocks.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }

    fn check_lag(&mut self, plan: &Plan) {
        let named: Vec<SequenceId> =
            plan.chunks.iter().map(|chunk| chunk.id).chain(plan.decode.iter().copied()).collect();
        for (index, id) in named.iter().enumerate() {
            assert!(!named[..index].contains(id), "{id} twice in one step");
            let names = |plan: &Plan| {
                plan.decode.contains(id) || plan.chunks.iter().any(|chunk| chunk.id == *id)
            };
            let admits = |plan: &Plan| plan.admit.iter().any(|admit| admit.id == *id);
            // Before its admission the id was another sequence's.
            let since = self.pending.iter().rposition(|pending| admits(&pending.plan));
            let first = if admits(plan) { self.pending.len() } else { since.unwrap_or(0) };
            let others = self.pending.range(first..).filter(|pending| names(&pending.plan));
            assert!(others.count() < self.limits.max_steps_in_flight.min(2));
        }
        for chunk in plan.chunks.iter().filter(|chunk| chunk.sample) {
            self.tables.get_mut(&chunk.id).expect("a known sequence").is_prefilling = false;
        }
    }
}
