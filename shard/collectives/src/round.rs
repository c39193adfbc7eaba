//! Rounds: how the members of a group exchange up to one chunk each.
//!
//! Every operation of a group is a series of rounds, numbered alike on all members. In round `k` a
//! member writes its call and its bytes into buffer `k % 2` of its own slot, publishes `k + 1`,
//! waits until every peer has published `k + 1`, and reads what it needs from their buffers `k % 2`.
//!
//! Two buffers suffice without another handshake. A member overwrites buffer `k % 2` in round
//! `k + 2`, which it enters after every peer has published `k + 2`; a peer publishes `k + 2` when it
//! enters round `k + 1`, and it reads the buffers of round `k` before that. So the reads of round
//! `k` happen before the writes of round `k + 2`, and `Event` makes that order visible.

#![allow(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;

use crate::CollectiveError;
use crate::call::{Call, Operation};
use crate::group::Group;
use crate::layout::CHUNK;
use crate::reduce;

/// From how many bytes on a group of three or more reduces in slices: each member sums one slice
/// and the sums are gathered, which moves `2 / size` of the bytes of "everyone sums everything" for
/// one more round. Two members gain nothing by it.
const SLICED_MIN: usize = 32 << 10;

impl Group {
    /// One round. `mine` is at most a chunk; `None` contributes nothing. Returns the parity of the
    /// buffers that now hold the peers' bytes, until the next round.
    pub(crate) fn meet(
        &mut self,
        call: Call,
        mine: Option<&[u8]>,
    ) -> Result<usize, CollectiveError> {
        let operation = call.operation.name();
        self.require(operation, call.len <= Call::LEN_MAX, || format!("{call} is too long"))?;
        if !self.slot_reserved {
            self.region.reserve(self.layout.slot(self.rank))?;
            self.slot_reserved = true;
        }
        let parity = (self.round % 2) as usize;
        if let Some(bytes) = mine {
            debug_assert!(bytes.len() <= CHUNK);
            // SAFETY: this member alone writes its slot; the peers' reads of this buffer ended
            // before they published the round before this one (module comment).
            unsafe { self.region.write(self.layout.bytes(self.rank, parity), bytes) };
        }
        // Relaxed: the publication below orders it.
        self.region.number(self.layout.call(self.rank, parity)).store(call.encode(), Relaxed);
        self.round = self.round.wrapping_add(1);
        self.region.event(self.layout.published(self.rank)).publish(self.round);

        for peer in self.peers() {
            let published = self.region.event(self.layout.published(peer));
            if let Err(error) = self.wait(operation, published, self.round, peer) {
                return Err(self.first_mismatch(call, parity).unwrap_or(error));
            }
            self.check_peer(call, peer, parity)?;
        }
        Ok(parity)
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.layout.size).filter(move |&peer| peer != rank)
    }

    fn check_peer(&self, call: Call, peer: usize, parity: usize) -> Result<(), CollectiveError> {
        let code = self.region.number(self.layout.call(peer, parity)).load(Relaxed);
        let rank = self.rank;
        self.require(call.operation.name(), code == call.encode(), || match Call::decode(code) {
            Some(theirs) => format!("rank {rank} calls {call}, rank {peer} calls {theirs}"),
            None => format!("rank {rank} calls {call}, rank {peer} wrote {code:#x}"),
        })
    }

    /// Why a round was aborted, if a peer that is here says so: the disagreement explains more than
    /// the abort that followed it.
    fn first_mismatch(&self, call: Call, parity: usize) -> Option<CollectiveError> {
        self.peers()
            .filter(|&peer| self.region.event(self.layout.published(peer)).value() == self.round)
            .find_map(|peer| self.check_peer(call, peer, parity).err())
    }

    /// Copies the start of a peer's buffer, in a round that `meet` completed.
    pub(crate) fn copy_from(&self, peer: usize, parity: usize, to: &mut [u8]) {
        // SAFETY: `meet` saw the peer publish this round, whose call (checked equal) says that the
        // peer contributed at least these bytes; the peer rewrites the buffer only after this
        // member's next-but-one round began (module comment).
        unsafe { self.region.read(self.layout.bytes(peer, parity), to) }
    }

    fn floats_of(&self, peer: usize, parity: usize, len: usize) -> &[f32] {
        // SAFETY: as for `copy_from`; the slice borrows `self`, and a later round needs `&mut self`.
        unsafe { self.region.floats(self.layout.bytes(peer, parity), len) }
    }

    pub(crate) fn reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        let call = Call::new(Operation::AllReduceSum, size_of_val(data));
        if self.layout.size == 1 {
            return Ok(());
        }
        if data.is_empty() {
            return self.meet(call, None).map(|_| ());
        }
        for chunk in data.chunks_mut(CHUNK / size_of::<f32>()) {
            if self.layout.size > 2 && size_of_val(chunk) >= SLICED_MIN {
                self.reduce_in_slices(call, chunk)?;
            } else {
                let parity = self.meet(call, Some(bytemuck::cast_slice(chunk)))?;
                let len = chunk.len();
                reduce::sum_in_rank_order(chunk, self.layout.size, self.rank, |peer| {
                    self.floats_of(peer, parity, len)
                });
            }
        }
        Ok(())
    }

    /// Two rounds: everyone's data, then everyone's sums of its own slice.
    fn reduce_in_slices(&mut self, call: Call, chunk: &mut [f32]) -> Result<(), CollectiveError> {
        let (size, len) = (self.layout.size, chunk.len());
        let slice = |member: usize| len * member / size..len * (member + 1) / size;
        let mine = slice(self.rank);

        let parity = self.meet(call, Some(bytemuck::cast_slice(chunk)))?;
        reduce::sum_in_rank_order(&mut chunk[mine.clone()], size, self.rank, |peer| {
            &self.floats_of(peer, parity, len)[mine.clone()]
        });
        let parity = self.meet(call, Some(bytemuck::cast_slice(&chunk[mine])))?;
        for peer in self.peers() {
            let target = &mut chunk[slice(peer)];
            self.copy_from(peer, parity, bytemuck::cast_slice_mut(target));
        }
        Ok(())
    }
}
