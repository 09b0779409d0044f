//! A client that holds a lock, appends numbers and has fio verify what it wrote, while NFS nodes come and go.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{ADDRESS, Fleet, STORE};

/// How a client talks to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// RDMA, here in software.
    Rdma,
}

impl Protocol {
    /// Options of mount(8).
    #[must_use]
    pub fn options(self) -> &'static str {
        match self {
            Self::Tcp => "vers=4.2,hard,proto=tcp",
            Self::Rdma => "vers=4.2,hard,proto=rdma,port=20049",
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
        }
    }
}

/// Appends a number after the other, under a lock, and notes when each was taken.
const APPEND: &str = "
    exec 9<>/mnt/lock; flock -x 9 || echo no lock >> /run/errors
    i=0; : > /mnt/numbers
    while [ ! -e /run/stop ]; do
        i=$((i + 1))
        echo $i >> /mnt/numbers || echo append $i >> /run/errors
        read -r up rest < /proc/uptime; echo $up $i >> /run/trace
        sleep 0.1
    done
    echo $i >&9 || echo lock lost >> /run/errors
    echo $i > /run/appended";
/// Writes, reads back and compares, over and over.
const VERIFY: &str = "
    while [ ! -e /run/stop ]; do
        fio --name=verify --filename=/mnt/blocks --direct=1 --ioengine=psync --rw=randwrite --bsrange=4k-64k \
            --blockalign=4k --size=4M --fsync=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
            --randrepeat=0 > /run/fio.log 2>&1 || echo fio >> /run/errors
        sleep 0.2
    done
    echo done > /run/verified";
/// All requests of the load are answered by then.
const END_LIMIT: Duration = Duration::from_secs(300);

/// Mounts the export on the client, and starts the load.
pub fn start(fleet: &mut Fleet, protocol: Protocol) -> Result<()> {
    let options = protocol.options();
    fleet.until(
        STORE,
        &format!("mount.nfs {ADDRESS}:/data /mnt -o {options}"),
    )?;
    let mounted = fleet.sh(STORE, "grep ' /mnt nfs4 ' /proc/mounts")?;
    let proto = options
        .rsplit("proto=")
        .next()
        .unwrap_or_default()
        .split(',')
        .next();
    ensure!(
        mounted.contains(&format!("proto={}", proto.unwrap_or_default())),
        "{mounted}"
    );
    fleet.sh(
        STORE,
        "rm -f /run/stop /run/trace /run/errors /run/appended /run/verified",
    )?;
    for (name, script) in [("append", APPEND), ("verify", VERIFY)] {
        fleet.sh(
            STORE,
            &format!(
                "cat > /run/{name}.sh <<'END'\n{script}\nEND\n\
                 sh /run/{name}.sh > /dev/null 2>> /run/errors &"
            ),
        )?;
    }
    progress(fleet)
}

/// Waits until more is written than was.
pub fn progress(fleet: &mut Fleet) -> Result<()> {
    let count = "cat /run/trace 2> /dev/null | wc -l";
    let before: u64 = fleet
        .sh(STORE, count)?
        .trim()
        .parse()
        .context("count what was written")?;
    fleet.until(STORE, &format!("test $({count}) -gt $(({before} + 10))"))?;
    let errors = fleet.sh(STORE, "cat /run/errors 2> /dev/null; true")?;
    ensure!(
        errors.is_empty(),
        "the client had errors: {errors}\n{}",
        fleet.logs()
    );
    Ok(())
}

/// The longest time without an answer since this was asked last, in seconds.
pub fn take_pause(fleet: &mut Fleet) -> Result<f64> {
    let script = "awk 'NR > 1 && $1 - last > most { most = $1 - last } { last = $1 } END { print most + 0 }' \
                  /run/trace; tail -n 1 /run/trace > /run/trace.new; cat /run/trace.new > /run/trace";
    fleet
        .sh(STORE, script)?
        .trim()
        .parse()
        .context("the longest pause")
}

/// Ends the load: nothing failed, the lock was never lost, and everything that was written is there.
pub fn finish(fleet: &mut Fleet) -> Result<()> {
    let active = fleet.active()?;
    let locks = fleet.sh(active, "grep -c 'POSIX.*WRITE' /proc/locks || true")?;
    ensure!(
        locks.trim() != "0",
        "the server does not have the client's lock"
    );
    fleet.sh(STORE, "touch /run/stop")?;
    let ended = "test -e /run/appended && test -e /run/verified";
    fleet
        .vm(STORE)?
        .sh_until(ended, END_LIMIT)
        .map_err(|error| error.context(fleet.logs()))?;
    let errors = fleet.sh(
        STORE,
        "cat /run/errors 2> /dev/null; cat /run/fio.log | tail -n 3; true",
    )?;
    ensure!(
        !errors.contains("fio\n") && !errors.contains("append"),
        "{errors}"
    );
    // Read from the server, not from the client's cache.
    fleet.sh(
        STORE,
        "test ! -s /run/errors && umount /mnt && echo 3 > /proc/sys/vm/drop_caches",
    )?;
    fleet.until(
        STORE,
        &format!("mount.nfs {ADDRESS}:/data /mnt -o vers=4.2,proto=tcp"),
    )?;
    fleet.sh(
        STORE,
        "n=$(cat /run/appended); seq $n > /run/expected; cmp /run/expected /mnt/numbers \
         && test $(cat /mnt/lock) = $n \
         && rm /mnt/lock /mnt/numbers && umount /mnt",
    )?;
    Ok(())
}
