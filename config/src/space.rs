//! When somebody is told that space becomes short.

use api::failure::{Failure, Result};

/// Shares of a pool's fullest device, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceWarnings {
    /// From here on it is told among what goes on.
    pub near_full_percent: u8,
    /// From here on it is wrong.
    pub critical_percent: u8,
}

impl Default for SpaceWarnings {
    fn default() -> Self {
        Self {
            near_full_percent: 80,
            critical_percent: 90,
        }
    }
}

impl SpaceWarnings {
    /// Those that are configured.
    pub(super) fn of(notice: Option<u8>, warning: Option<u8>) -> Result<Self> {
        let default = Self::default();
        // Whoever wants to be told late wants no warning before.
        let near_full_percent =
            notice.unwrap_or(default.near_full_percent.min(warning.unwrap_or(100)));
        let critical_percent = warning.unwrap_or(default.critical_percent.max(near_full_percent));
        let asked = Self {
            near_full_percent,
            critical_percent,
        };
        if !(1..=100).contains(&near_full_percent)
            || !(near_full_percent..=100).contains(&critical_percent)
        {
            return Err(Failure::invalid(
                format!(
                    "pool_near_full_percent = {near_full_percent} and pool_critical_percent = \
                     {critical_percent} make no sense"
                ),
                "give percentages from 1 to 100, the first one not above the second",
            ));
        }
        Ok(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_in_order_and_each_has_a_default() {
        let of = |notice, warning| {
            let of = SpaceWarnings::of(notice, warning);
            of.map(|of| (of.near_full_percent, of.critical_percent))
        };
        assert_eq!(of(None, None).unwrap(), (80, 90));
        assert_eq!(of(Some(95), None).unwrap(), (95, 95));
        assert_eq!(of(None, Some(50)).unwrap(), (50, 50));
        assert_eq!(of(Some(100), Some(100)).unwrap(), (100, 100));
        for (notice, warning) in [(0, 90), (90, 80), (80, 101), (101, 101)] {
            let told = of(Some(notice), Some(warning)).unwrap_err().to_string();
            assert!(told.contains(&format!("= {notice} and")), "{told}");
        }
    }
}
