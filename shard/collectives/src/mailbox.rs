//! Mailboxes: one ring of bytes for every ordered pair of ranks, with one writer and one reader.
//!
//! A message is its call (8 bytes) and its data. Positions count bytes for ever and wrap at 2³²,
//! which the ring's length divides. The writer owns `written`, the reader owns `read`, and
//! `read <= written <= read + RING` holds at every moment.

#![allow(unsafe_code)]

use crate::CollectiveError;
use crate::call::{Call, Operation};
use crate::group::Group;
use crate::layout::RING;

/// Bytes after which one end lets the other go on, so that both ends of a long message copy at the
/// same time.
const GRAIN: usize = 64 << 10;

const _: () = assert!(RING.is_power_of_two() && RING < 1 << 31 && GRAIN <= RING);

impl Group {
    /// Writes one message, waiting while the ring is full.
    pub(crate) fn post(
        &mut self,
        operation: Operation,
        to: usize,
        data: &[u8],
    ) -> Result<(), CollectiveError> {
        let call = Call::new(operation, data.len());
        let name = operation.name();
        let header = call.encode().to_le_bytes();
        self.require(name, call.len <= Call::LEN_MAX, || format!("{call} is too long"))?;
        let fits = header.len() + data.len() <= RING;
        // Nobody empties a rank's ring to itself while it is sending.
        self.require(name, fits || to != self.rank, || format!("{call} from a rank to itself"))?;
        let ring = self.layout.ring(self.rank, to);
        if !self.ring_reserved[to] {
            self.region.reserve(ring.clone())?;
            self.ring_reserved[to] = true;
        }
        let written = self.region.event(self.layout.written(self.rank, to));
        let read = self.region.event(self.layout.read(self.rank, to));
        let mut position = written.value();
        let mut published = position;
        for mut rest in [&header[..], data] {
            while !rest.is_empty() {
                let free = RING - position.wrapping_sub(read.value()) as usize;
                if free == 0 || position.wrapping_sub(published) as usize >= GRAIN {
                    written.publish(position);
                    published = position;
                }
                if free == 0 {
                    let target = position.wrapping_sub(RING as u32).wrapping_add(1);
                    self.wait(name, read, target, to)?;
                    continue;
                }
                let at = position as usize % RING;
                let (part, later) = rest.split_at(rest.len().min(free).min(RING - at).min(GRAIN));
                // SAFETY: this rank alone writes this ring, and only bytes that the reader has
                // read: `position + part <= read + RING`.
                unsafe { self.region.write(ring.start + at, part) };
                position = position.wrapping_add(part.len() as u32);
                rest = later;
            }
        }
        written.publish(position);
        Ok(())
    }

    /// Reads one message, which must be what `operation` sends and as long as `data`.
    pub(crate) fn take(
        &mut self,
        operation: Operation,
        from: usize,
        data: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let name = match operation {
            Operation::Send => "recv",
            _ => "recv_bytes",
        };
        let expected = Call::new(operation, data.len());
        let mut header = [0; 8];
        self.fill(name, from, &mut header)?;
        let code = u64::from_le_bytes(header);
        self.require(name, code == expected.encode(), || match Call::decode(code) {
            Some(sent) => format!("rank {from} sent {sent}, the receiver wants {expected}"),
            None => format!("rank {from} sent {code:#x}, the receiver wants {expected}"),
        })?;
        self.fill(name, from, data)
    }

    /// Reads the next bytes of a mailbox.
    fn fill(
        &self,
        name: &'static str,
        from: usize,
        data: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let ring = self.layout.ring(from, self.rank);
        let written = self.region.event(self.layout.written(from, self.rank));
        let read = self.region.event(self.layout.read(from, self.rank));
        let mut position = read.value();
        let mut rest = data;
        while !rest.is_empty() {
            let available = written.value().wrapping_sub(position) as usize;
            if available == 0 {
                self.wait(name, written, position.wrapping_add(1), from)?;
                continue;
            }
            let at = position as usize % RING;
            let len = rest.len().min(available).min(RING - at).min(GRAIN);
            let (part, later) = rest.split_at_mut(len);
            // SAFETY: `written` says that these bytes were written, and the writer leaves them
            // alone until `read` passes them.
            unsafe { self.region.read(ring.start + at, part) };
            position = position.wrapping_add(len as u32);
            read.publish(position);
            rest = later;
        }
        Ok(())
    }
}
