//! The file of a unix socket.

use std::{fs, path::Path};

/// Removes a socket, and its folder when this was the last thing in it: a launcher that was killed
/// cannot do so.
pub fn remove_socket(path: &Path) {
    // Both may be gone already, and a folder that is in use stays.
    drop(fs::remove_file(path));
    if let Some(folder) = path.parent() {
        drop(fs::remove_dir(folder));
    }
}
