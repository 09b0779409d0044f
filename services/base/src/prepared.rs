//! The configuration of a daemon, with the resources that the process opened while it had all its rights.

use std::ops::Deref;

use config::Config;
use fabric_store::file::OpenedAhead;
use sandbox::Confinement;

/// Configuration and open resources that a node is started with.
#[derive(Debug, Clone)]
pub struct Prepared {
    config: Config,
    /// Limits that the sandbox sets.
    pub confinement: Confinement,
    /// Block devices that were opened before the user changed, and those handed over since.
    pub opened: OpenedAhead,
}

impl Prepared {
    /// Returns the state of a process that gave up no privileges.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            confinement: Confinement::default(),
            opened: OpenedAhead::default(),
        }
    }
}

impl Deref for Prepared {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.config
    }
}
