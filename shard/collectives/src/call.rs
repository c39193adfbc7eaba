//! What a rank calls: written beside its data, so that ranks that disagree get an error and not
//! garbage.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    AllReduceSum = 1,
    AllGather,
    Broadcast,
    Barrier,
    Send,
    SendBytes,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduceSum => "all_reduce_sum",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::SendBytes => "send_bytes",
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [
            Self::AllReduceSum,
            Self::AllGather,
            Self::Broadcast,
            Self::Barrier,
            Self::Send,
            Self::SendBytes,
        ]
        .into_iter()
        .find(|operation| *operation as u8 == code)
    }
}

/// One call: operation, root (broadcast only) and bytes of one rank's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) root: usize,
    pub(crate) len: usize,
}

impl Call {
    /// Longest data of one call: 1 TiB.
    pub(crate) const LEN_MAX: usize = (1 << 40) - 1;

    pub(crate) fn new(operation: Operation, len: usize) -> Self {
        Self { operation, root: 0, len }
    }

    /// `operation:8 | root:16 | len:40`. Never 0.
    pub(crate) fn encode(self) -> u64 {
        (self.operation as u64) << 56 | (self.root as u64) << 40 | self.len as u64
    }

    /// What [`Call::encode`] made, or `None` for bytes that no call writes.
    pub(crate) fn decode(code: u64) -> Option<Self> {
        Some(Self {
            operation: Operation::from_code((code >> 56) as u8)?,
            root: (code >> 40) as usize & 0xffff,
            len: (code as usize) & Self::LEN_MAX,
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.operation.name(), self.len)?;
        if self.operation == Operation::Broadcast {
            write!(f, " from rank {}", self.root)?;
        }
        Ok(())
    }
}
