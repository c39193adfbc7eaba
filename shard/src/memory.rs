//! How many KV blocks a rank takes.

use std::fs;

/// What is asked for, in blocks and bytes.
#[derive(Clone, Copy, Debug)]
pub struct KvDemand {
    pub bytes_per_block: u64,
    /// Blocks that `max_sequences` sequences of `max_model_len` tokens fill.
    pub useful_blocks: u64,
    /// `--kv-cache-memory`: bytes of this rank.
    pub memory: Option<u64>,
    /// Ranks that share the available memory.
    pub ranks: u64,
    /// Bytes that can be had now.
    pub available: u64,
    /// The part of them that is taken unless told otherwise.
    pub default_share: f64,
}

impl KvDemand {
    /// Never more blocks than sequences can fill. Within that: what `--kv-cache-memory` says, else
    /// this rank's share of the device's default part of the memory that is available.
    pub fn blocks(&self) -> u32 {
        let budget = self.memory.unwrap_or((self.share() as f64 * self.default_share) as u64);
        let blocks = (budget / self.bytes_per_block.max(1)).min(self.useful_blocks);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// What is asked for and what this rank may have, where the one is more than the other: it would
    /// run out of memory in the middle of its work.
    pub fn excess(&self) -> Option<(u64, u64)> {
        let asked = self.memory?.min(self.useful_blocks.saturating_mul(self.bytes_per_block));
        (asked > self.share()).then_some((asked, self.share()))
    }

    fn share(&self) -> u64 {
        self.available / self.ranks.max(1)
    }
}

/// Bytes that new allocations may take: `MemAvailable`, or less where a control group says so.
pub fn available_bytes() -> u64 {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let read = |file: &str| {
        fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse::<u64>().ok()
    };
    let group = read("memory.max")
        .zip(read("memory.current"))
        .map(|(max, current)| max.saturating_sub(current));
    match (host, group) {
        (Some(host), Some(group)) => host.min(group),
        (host, group) => host.or(group).unwrap_or(0),
    }
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Reads a size: bytes, or a number with K, M, G or T (powers of 1024; `iB` or `B` may follow).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("{text:?} is no size: use bytes, or a number with K, M, G or T")),
    };
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no size: no number"))?;
    number
        .checked_mul(1 << shift)
        .filter(|size| *size > 0)
        .ok_or_else(|| format!("{text:?}: a size must be 1 byte to 16 EiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |text: &str, expected: Option<u64>| {
            assert_eq!(parse_size(text).ok(), expected, "{text}");
        };
        check("4096", Some(4096));
        check("2GiB", Some(2 << 30));
        check("512 m", Some(512 << 20));
        check("1k", Some(1024));
        check("0", None);
        check("", None);
        check("GiB", None);
        check("-1", None);
        check("1.5G", None);
        check("99999999999T", None);
    }

    #[test]
    fn blocks_follow_the_rule() {
        let base = KvDemand {
            bytes_per_block: 1000,
            useful_blocks: 50,
            memory: None,
            ranks: 2,
            available: 400_000,
            default_share: 0.25,
        };
        let check = |demand: KvDemand, blocks| assert_eq!(demand.blocks(), blocks, "{demand:?}");
        check(base, 50);
        check(KvDemand { available: 80_000, ..base }, 10);
        check(KvDemand { memory: Some(7_999), ..base }, 7);
        check(KvDemand { memory: Some(1 << 40), ..base }, 50);
        check(KvDemand { available: 0, ..base }, 0);
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let base = KvDemand {
            bytes_per_block: 1000,
            useful_blocks: 500,
            memory: None,
            ranks: 2,
            available: 400_000,
            default_share: 0.25,
        };
        let check = |memory, useful_blocks, excess| {
            let demand = KvDemand { memory, useful_blocks, ..base };
            assert_eq!(demand.excess(), excess, "{demand:?}");
        };
        check(None, 500, None);
        check(Some(200_000), 500, None);
        check(Some(200_001), 500, Some((200_001, 200_000)));
        check(Some(1 << 40), 500, Some((500_000, 200_000)));
        check(Some(1 << 40), 200, None);
    }

    #[test]
    fn meminfo() {
        let text = "MemTotal: 100 kB\nMemAvailable:   42 kB\n";
        assert_eq!(mem_available(text), Some(42 * 1024));
        assert_eq!(mem_available("MemTotal: 100 kB"), None);
        assert!(available_bytes() > 0, "this host has /proc/meminfo");
    }
}
