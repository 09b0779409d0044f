//! What a domain needs of its host beside the daemon: huge pages, and the hook.

use std::path::Path;

use super::{Finding, Level};
use crate::domain::{Domain, MemorySource};

/// Where the kernel tells of its huge pages.
pub const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Huge pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePages {
    /// Size of one.
    pub kib: u64,
    /// How many nobody has.
    pub free: u64,
    /// How many there are.
    pub all: u64,
}

/// The huge pages that `directory` (of [`HUGE_PAGES`]' kind) tells of, by size. What cannot be read is left
/// out.
pub fn huge_pages(directory: &Path) -> Vec<HugePages> {
    let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let pages = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        Some(HugePages {
            kib: kib.parse().ok()?,
            free: number(&entry.path().join("free_hugepages"))?,
            all: number(&entry.path().join("nr_hugepages"))?,
        })
    });
    let mut pages: Vec<HugePages> = pages.collect();
    pages.sort_unstable_by_key(|pages| pages.kib);
    pages
}

/// Whether the host has the huge pages that the domain wants; nothing if it wants none. A domain that runs
/// has them.
pub fn free_huge_pages(domain: &Domain, is_running: bool, host: &[HugePages]) -> Option<Finding> {
    if domain.memory.source != MemorySource::HugePages {
        return None;
    }
    let check = "huge pages";
    if is_running {
        return Some(Finding::new(check, Level::Ok, "the domain runs on them"));
    }
    let wanted_kib = domain.memory.page_kib;
    let pages = host
        .iter()
        // Without a size the kernel's default counts, which is its smallest nearly everywhere.
        .find(|pages| wanted_kib.is_none_or(|kib| pages.kib == kib));
    let Some(pages) = pages else {
        let size = wanted_kib.map_or(String::new(), |kib| format!(" of {kib} KiB"));
        let found = format!("the host's kernel has no huge pages{size}");
        return Some(Finding::new(check, Level::Fail, found).fix(
            "<page size='2' unit='M'/> in <hugepages>, or <source type='memfd'/> in its place",
        ));
    };
    let needed = domain.memory.kib.div_ceil(pages.kib);
    let found = format!("{needed} of {} KiB needed, {} free", pages.kib, pages.free);
    let finding = Finding::new(check, Level::Ok, found);
    if pages.free >= needed {
        return Some(finding);
    }
    let total = pages.all + needed - pages.free;
    let file = format!("{HUGE_PAGES}/hugepages-{}kB/nr_hugepages", pages.kib);
    let fix = format!("echo {total} > {file}");
    Some(Finding {
        level: Level::Fail,
        ..finding.fix(fix)
    })
}

/// Whether libvirt runs our hook, for a domain that has something to be attached; nothing for any other.
/// `is_served` is whether all of that is attached now.
pub fn hook(domain: &Domain, is_installed: bool, is_served: bool) -> Option<Finding> {
    let check = "hook";
    if domain.disks.is_empty() && domain.asked.is_empty() && !domain.has_filesystem() {
        return None;
    }
    if is_installed {
        let found = "attaches what the domain needs when it starts";
        return Some(Finding::new(check, Level::Ok, found));
    }
    let install = "penstock libvirt hook install && systemctl restart libvirtd";
    let asks_nothing = domain.asked.is_empty() && domain.asked_filesystems.is_empty();
    Some(match (asks_nothing, is_served) {
        (false, _) => Finding::new(
            check,
            Level::Fail,
            "the domain's metadata ask for attachments, and without the hook nobody reads them",
        )
        .fix(install),
        (true, false) => Finding::new(
            check,
            Level::Warn,
            "not installed: what is not attached, nobody attaches when the domain starts",
        )
        .fix(install),
        (true, true) => Finding::new(check, Level::Ok, "not installed; all is attached by hand"),
    })
}
