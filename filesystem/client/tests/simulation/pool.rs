//! A pool that a filesystem shares with others.

use std::time::Duration;

use fs_client::Space;

use crate::world::{State, World};

/// The longest that a report of the pool's space is behind.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(3);

/// Space of a pool.
pub struct Pool {
    total: u64,
    used: u64,
    reported: Space,
}

impl Pool {
    fn new(total: u64) -> Self {
        Self {
            total,
            used: 0,
            reported: Space {
                total_bytes: total,
                free_bytes: total,
            },
        }
    }

    /// Takes space if there is enough.
    pub fn take(&mut self, bytes: u64) -> bool {
        let has_room = self.used + bytes <= self.total;
        if has_room {
            self.used += bytes;
        }
        has_room
    }

    pub fn give_back(&mut self, bytes: u64) {
        self.used -= bytes;
    }

    /// By the last report.
    pub fn reported(&self) -> Space {
        self.reported
    }

    fn report(&mut self) {
        self.reported.free_bytes = self.total - self.used;
    }
}

/// Has the world's file data share a pool, whose space is reported now and then.
pub fn limit(world: &World, total: u64) {
    world.state().pool = Some(Pool::new(total));
    repeat(world, REPORT_INTERVAL, |world| {
        world.state().pool().report();
    });
}

/// Does something again and again beside all else.
pub fn repeat(world: &World, interval: Duration, act: impl Fn(&World) + Send + 'static) {
    let world = world.clone();
    let runtime = world.runtime.clone();
    drop(runtime.spawn(async move {
        loop {
            world.runtime.sleep(interval).await;
            act(&world);
        }
    }));
}

impl State {
    /// The pool, which is limited.
    pub fn pool(&mut self) -> &mut Pool {
        self.pool.as_mut().expect("the pool is limited")
    }
}
