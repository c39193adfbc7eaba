//! Where things lie in a world's region. A pure function of `tp` and `pp`, so that every rank
//! computes the same.
//!
//! ```text
//! header | tensor group of stage 0 | … | of stage pp - 1 | global group
//! group:   slot of member 0 | … | mailbox 0→0 | 0→1 | …
//! slot:    event "rounds published" | call[0] | call[1] … page … | bytes[0] | bytes[1]
//! mailbox: event "bytes written" | event "bytes read" … page … | ring
//! ```
//!
//! Most of it is never touched, and untouched pages cost nothing: a mailbox exists for every ordered
//! pair of ranks, but only neighbouring stages and the token return use theirs.

use std::ops::Range;

/// Most ranks of one world. Keeps the mailboxes' address space within a few GiB.
pub(crate) const RANKS_MAX: usize = 64;

/// Bytes that a member contributes to one round; longer data goes in several rounds. Two such
/// buffers of a few ranks fit into a second-level cache.
pub(crate) const CHUNK: usize = 256 << 10;

/// Bytes in flight from one rank to another before the sender waits. Holds more token-return
/// messages (at most 64 KiB each) than steps are ever in flight, so those never wait.
pub(crate) const RING: usize = 1 << 20;

const PAGE: usize = 4096;
const EVENT: usize = 64;

/// Set to 1 when the world is unusable.
pub(crate) const ABORTED: usize = 0;
/// Ranks that have joined.
pub(crate) const JOINED: usize = EVENT;
/// Set to 1 by rank 0 when the object's name is gone.
pub(crate) const UNLINKED: usize = 2 * EVENT;
/// A number that says how this region is laid out; 0 until the first rank joins.
pub(crate) const SHAPE: usize = 3 * EVENT;

/// The number that rank `rank` claims by its process id.
pub(crate) fn claim(rank: usize) -> usize {
    PAGE / 2 + rank * size_of::<u64>()
}

/// What [`SHAPE`] holds: differs if two builds or two plans disagree about the layout.
pub(crate) fn shape(tp: usize, pp: usize) -> u64 {
    const REVISION: u64 = 1;
    REVISION << 48 | (CHUNK as u64 >> 10) << 32 | (tp as u64) << 16 | pp as u64
}

/// One group's part of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupLayout {
    base: usize,
    pub(crate) size: usize,
}

impl GroupLayout {
    const SLOT: usize = PAGE + 2 * CHUNK;
    const MAILBOX: usize = PAGE + RING;

    fn end(self) -> usize {
        self.mailbox(self.size, 0)
    }

    /// The whole slot of a member.
    pub(crate) fn slot(self, member: usize) -> Range<usize> {
        let start = self.base + member * Self::SLOT;
        start..start + Self::SLOT
    }

    /// The event that counts the rounds a member has published.
    pub(crate) fn published(self, member: usize) -> usize {
        self.slot(member).start
    }

    /// The number that says what a member calls in a round of this parity.
    pub(crate) fn call(self, member: usize, parity: usize) -> usize {
        self.slot(member).start + EVENT * (1 + parity)
    }

    /// The bytes of a member in a round of this parity.
    pub(crate) fn bytes(self, member: usize, parity: usize) -> usize {
        self.slot(member).start + PAGE + parity * CHUNK
    }

    fn mailbox(self, from: usize, to: usize) -> usize {
        self.base + self.size * Self::SLOT + (from * self.size + to) * Self::MAILBOX
    }

    /// The event that counts the bytes ever written to a mailbox.
    pub(crate) fn written(self, from: usize, to: usize) -> usize {
        self.mailbox(from, to)
    }

    /// The event that counts the bytes ever read from a mailbox.
    pub(crate) fn read(self, from: usize, to: usize) -> usize {
        self.mailbox(from, to) + EVENT
    }

    /// The ring of a mailbox.
    pub(crate) fn ring(self, from: usize, to: usize) -> Range<usize> {
        let start = self.mailbox(from, to) + PAGE;
        start..start + RING
    }
}

/// The groups of a world, and how long its region is.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Of stage 0, 1, …
    pub(crate) tensor: Vec<GroupLayout>,
    pub(crate) global: GroupLayout,
    pub(crate) len: usize,
}

impl Layout {
    pub(crate) fn new(tp: usize, pp: usize) -> Self {
        let mut base = PAGE;
        let mut group = |size| {
            let group = GroupLayout { base, size };
            base = group.end();
            group
        };
        let tensor = (0..pp).map(|_| group(tp)).collect();
        let global = group(tp * pp);
        Self { tensor, global, len: base }
    }
}
