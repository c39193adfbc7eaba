//! Amounts of memory as people write them.

use std::str::FromStr;

/// A number of bytes, read from `1073741824`, `1GiB`, `1.5G`, `512MB` (all units are powers of 1024,
/// as in every GPU tool).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let number: f64 = number
            .parse()
            .map_err(|_| format!("'{text}' is not a size such as 512MiB, 2GiB or 1073741824"))?;
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            other => return Err(format!("unit '{other}' of '{text}' is not one of K, M, G, T")),
        };
        let bytes =
            number * f64::from(1u32 << 20).powi(shift / 20) * f64::from(1u32 << (shift % 20));
        if !(1.0..9.0e18).contains(&bytes) {
            return Err(format!("'{text}' is not between 1 byte and 8 EiB"));
        }
        Ok(Self(bytes as u64))
    }
}

/// Bytes for a person: `93.8 MiB`.
pub fn display(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 || unit == "TiB" {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    unreachable!("the last unit takes any value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let check = |text: &str, want: Option<u64>| {
            let got = text.parse::<Size>();
            assert_eq!(got.as_ref().ok().map(|s| s.0), want, "{text}: {got:?}");
        };
        check("1", Some(1));
        check("4096", Some(4096));
        check("1k", Some(1024));
        check("1.5 GiB", Some(1_610_612_736));
        check("512MB", Some(512 << 20));
        check("2t", Some(2 << 40));
        check("0", None);
        check("-1", None);
        check("", None);
        check("GiB", None);
        check("1.2.3G", None);
        check("1 parsec", None);
        check("99999999999T", None);
    }

    #[test]
    fn sizes_are_shown_short() {
        assert_eq!(display(12), "12 B");
        assert_eq!(display(98_362_432), "93.8 MiB");
        assert_eq!(display(3 << 50), "3072.0 TiB");
    }
}
