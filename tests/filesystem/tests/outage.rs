//! What becomes of calls while nobody leads a filesystem's metadata group.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions};
use filesystem_rig::front_end::{FrontEnd, ROOT, SLOTS};
use filesystem_rig::mount_again;
use guest_rig::paths::penstock_binary;
use guest_rig::process::wait_until;

/// Front ends, each with as many calls as its ring holds: 1,024 together.
const FRONT_ENDS: usize = 16;
/// All are under way within this.
const LIMIT: Duration = Duration::from_secs(30);
/// How long there is no leader from then on at least. Each call may last longer than that.
const OUTAGE: Duration = Duration::from_secs(5);
/// Pause between two looks at the daemon's threads, short enough to see short-lived ones.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Threads that the daemon starts and ends for blocking calls under any load: its `BLOCKING_THREADS_MAX`.
const MORE_THREADS_MAX: usize = 32;

/// Number of threads by name.
type Threads = BTreeMap<String, usize>;

fn count(threads: &Threads) -> usize {
    threads.values().sum()
}

/// Replaces `most` if the process has more threads now.
fn look(pid: u32, most: &mut Threads) -> Result<()> {
    let now = threads(pid)?;
    if count(&now) > count(most) {
        *most = now;
    }
    Ok(())
}

fn threads(pid: u32) -> Result<Threads> {
    let mut by_name = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has just ended has no name.
        if let Ok(name) = std::fs::read_to_string(task?.path().join("comm")) {
            *by_name.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    Ok(by_name)
}

fn names(front_end: usize) -> Vec<Vec<u8>> {
    let names = (0..SLOTS).map(|call| format!("{front_end}-{call}").into_bytes());
    names.collect()
}

#[test]
fn a_thousand_calls_wait_for_a_leader_without_a_thread_each() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    let daemon = cluster.node(1)?.daemon();
    daemon.cli(&["fs", "create", "tree"])?;
    let mounted = |number| mount_again(daemon, "tree", number);
    let mut front_ends: Vec<FrontEnd> = (0..FRONT_ENDS).map(mounted).collect::<Result<_>>()?;
    let directory = front_ends[0].make_directory(ROOT, b"many")?;
    for one in &mut front_ends {
        one.look_up(ROOT, b"many")?;
    }
    let pid = daemon.pid()?;
    let before = threads(pid)?;

    for number in [2, 3] {
        cluster.node_mut(number)?.kill()?;
    }
    std::thread::scope(|scope| -> Result<()> {
        let calls = front_ends.iter_mut().enumerate().map(|(number, one)| {
            scope.spawn(move || one.make_files(directory, &names(number), &[]))
        });
        let calls: Vec<_> = calls.collect();
        let mut most = before.clone();
        let waiting = wait_until(LIMIT, || {
            look(pid, &mut most)?;
            let daemon = cluster.node(1)?.daemon();
            let waiting = daemon.metric("penstock_filesystem_requests_in_flight")?;
            Ok((waiting == (FRONT_ENDS * SLOTS) as f64).then_some(()))
        });
        let begin = Instant::now();
        while begin.elapsed() < OUTAGE {
            look(pid, &mut most)?;
            std::thread::sleep(LOOK_PAUSE);
        }
        let ended = calls.iter().filter(|call| call.is_finished()).count();
        for number in [2, 3] {
            cluster.node_mut(number)?.spawn()?;
        }
        for call in calls {
            call.join().expect("it does not panic")?;
        }
        waiting.context("not all calls are under way")?;
        ensure!(ended == 0, "{ended} have ended without a leader");
        let seen = format!(
            "{} threads before, at most {} with all calls under way: {before:?}, {most:?}",
            count(&before),
            count(&most)
        );
        println!("{seen}");
        ensure!(count(&most) <= count(&before) + MORE_THREADS_MAX, "{seen}");
        Ok(())
    })
    .with_context(|| cluster.report())?;

    // Each was done once.
    let daemon = cluster.node(1)?.daemon();
    let shown = daemon.json(&["fs", "show", "tree"])?;
    let inodes = 2 + (FRONT_ENDS * SLOTS) as u64;
    ensure!(shown["inodes"] == inodes, "{shown}");
    for (number, one) in front_ends.iter_mut().enumerate() {
        one.remove_files(directory, &names(number))?;
    }
    Ok(())
}
