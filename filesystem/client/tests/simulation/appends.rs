//! Tasks of two hosts append to one file: each record is there once, and whole.

use std::collections::BTreeMap;

use fuse_codec::Handle;

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{faulty, seeds, slow};

const RECORD: usize = 100;
const RECORDS: usize = 15;

fn record(task: usize, number: usize) -> String {
    format!(
        "{:>width$}\n",
        format!("{task}:{number}"),
        width = RECORD - 1
    )
}

/// Appends records; which of them were acknowledged.
async fn append(guest: Guest, file: u64, handle: Handle, task: usize) -> BTreeMap<String, bool> {
    let mut records = BTreeMap::new();
    for number in 0..RECORDS {
        let record = record(task, number);
        let appended = guest.append(file, handle, record.as_bytes()).await;
        records.insert(record, appended.is_ok());
    }
    records
}

pub async fn appends(world: World, faults: Faults, mutation: Option<Mutation>) {
    let hosts = [client(&world, 1, mutation), client(&world, 2, mutation)];
    let first = Guest::new(&hosts[0]);
    let (file, _) = first.create(ROOT, "log", RDWR).await.unwrap();
    let mut tasks = Vec::new();
    for task in 0..4 {
        let guest = Guest::new(&hosts[task % 2]);
        let handle = guest.open(file, RDWR | libc::O_APPEND).await.unwrap();
        tasks.push(append(guest, file, handle, task));
    }
    world.set_faults(faults);
    let running: Vec<_> = tasks
        .into_iter()
        .map(|task| world.runtime.spawn(task))
        .collect();
    let mut records = BTreeMap::new();
    for task in running {
        records.extend(task.await.unwrap());
    }
    world.set_faults(slow());
    let handle = first.open(file, 0).await.unwrap();
    let content = first.read(file, handle, 0, 1 << 20).await.unwrap();
    let mut found = BTreeMap::<&str, usize>::new();
    for chunk in content.chunks(RECORD) {
        let text = std::str::from_utf8(chunk).unwrap_or("torn");
        *found.entry(text).or_default() += 1;
    }
    for (text, count) in &found {
        if *count > 1 || !records.contains_key(*text) {
            world.violation(format!("{text:?} is there {count} times"));
        }
    }
    for (record, is_acknowledged) in &records {
        if *is_acknowledged && !found.contains_key(record.as_str()) {
            world.violation(format!("{record:?} is lost"));
        }
    }
}

#[test]
fn appends_of_two_hosts_are_all_kept() {
    seeds(20, |world| appends(world, slow(), None));
}

#[test]
fn appends_are_kept_once_whatever_goes_wrong() {
    seeds(40, |world| appends(world, faulty(), None));
}
