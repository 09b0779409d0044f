//! What only sysfs tells of devices: of which kind a GID is, and to which interface it belongs.

use std::io;
use std::path::{Path, PathBuf};

use super::address::{GidIndex, PortNumber};
use super::gid::GidKind;

/// Where the kernel shows RDMA devices. The directory is missing when no driver is loaded.
const DEVICES: &str = "/sys/class/infiniband";

/// The kernel's directory of RDMA devices, or one that looks like it.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::at(Path::new(DEVICES))
    }
}

impl Sysfs {
    /// Devices below `root`.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Names of the devices in order; none where there is no such directory.
    pub fn devices(&self) -> io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    }

    /// The kind of a GID; `None` for an entry that is empty, and for a kind that is not known.
    pub fn gid_kind(&self, device: &str, port: PortNumber, index: GidIndex) -> Option<GidKind> {
        self.attribute(device, port, "types", index)?.parse().ok()
    }

    /// The interface that a GID belongs to, `eth0` for example; `None` for an entry that is empty, and on
    /// InfiniBand.
    pub fn gid_interface(&self, device: &str, port: PortNumber, index: GidIndex) -> Option<String> {
        self.attribute(device, port, "ndevs", index)
            .filter(|name| !name.is_empty())
    }

    /// The kernel fails to read entries that are empty.
    fn attribute(
        &self,
        device: &str,
        port: PortNumber,
        name: &str,
        index: GidIndex,
    ) -> Option<String> {
        let path = self
            .root
            .join(device)
            .join(format!("ports/{port}/gid_attrs/{name}/{index}"));
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: PortNumber = PortNumber(1);

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (device, attribute, index, text) in [
            ("rxe0", "types", 0, "RoCE v2\n"),
            ("rxe0", "ndevs", 0, "eth0\n"),
            ("mlx5_0", "types", 3, "IB/RoCE v1\n"),
            ("mlx5_0", "types", 4, "RoCE v9\n"),
            ("mlx5_0", "ndevs", 4, "\n"),
        ] {
            let directory = root
                .path()
                .join(device)
                .join("ports/1/gid_attrs")
                .join(attribute);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(index.to_string()), text).unwrap();
        }
        root
    }

    #[test]
    fn devices_are_listed_by_name() {
        let root = tree();
        let sysfs = Sysfs::at(root.path());
        assert_eq!(sysfs.devices().unwrap(), ["mlx5_0", "rxe0"]);
    }

    #[test]
    fn no_directory_is_no_device_and_no_error() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::at(&root.path().join("infiniband"));
        assert_eq!(sysfs.devices().unwrap(), Vec::<String>::new());
        assert_eq!(sysfs.gid_kind("rxe0", PORT, GidIndex(0)), None);
    }

    #[test]
    fn kinds_and_interfaces_of_gids_are_read() {
        let root = tree();
        let sysfs = Sysfs::at(root.path());
        assert_eq!(
            sysfs.gid_kind("rxe0", PORT, GidIndex(0)),
            Some(GidKind::RoceV2)
        );
        assert_eq!(
            sysfs.gid_interface("rxe0", PORT, GidIndex(0)).as_deref(),
            Some("eth0")
        );
        let kind = sysfs.gid_kind("mlx5_0", PORT, GidIndex(3));
        assert_eq!(kind, Some(GidKind::InfinibandOrRoceV1));
    }

    #[test]
    fn what_is_missing_or_not_known_is_none() {
        let root = tree();
        let sysfs = Sysfs::at(root.path());
        assert_eq!(sysfs.gid_kind("rxe0", PORT, GidIndex(1)), None);
        assert_eq!(sysfs.gid_kind("rxe0", PortNumber(2), GidIndex(0)), None);
        assert_eq!(sysfs.gid_kind("mlx5_0", PORT, GidIndex(4)), None);
        assert_eq!(sysfs.gid_interface("mlx5_0", PORT, GidIndex(4)), None);
    }
}
