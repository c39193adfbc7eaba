//! How many NVIDIA GPUs the shards will see, told without the driver.

use std::{fs, path::Path};

/// Those of this machine, or as many as `CUDA_VISIBLE_DEVICES` leaves.
pub fn visible() -> usize {
    let installed = installed(Path::new("/dev"));
    std::env::var("CUDA_VISIBLE_DEVICES").map_or(installed, |names| named(&names, installed))
}

/// The driver makes a device node for each.
fn installed(dev: &Path) -> usize {
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count()
}

/// CUDA reads names or numbers up to the first that it does not know; -1 hides all that follow.
fn named(names: &str, installed: usize) -> usize {
    let known = |name: &&str| !name.is_empty() && !name.starts_with('-');
    names.split(',').map(str::trim).take_while(known).count().min(installed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted() {
        let check = |names: &str, expected: usize| assert_eq!(named(names, 4), expected, "{names}");
        check("0", 1);
        check("2,3", 2);
        check("GPU-1a, GPU-2b,GPU-3c", 3);
        check("0,1,2,3,4,5", 4);
        check("", 0);
        check("-1,0", 0);
        let dev = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"] {
            fs::write(dev.path().join(name), "").unwrap();
        }
        assert_eq!(installed(dev.path()), 3);
    }
}
