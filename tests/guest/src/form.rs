//! Tests that need minutes have two forms: a short one for every run, and a long one for `cargo xtask test
//! --long`.

/// Set to `1`, it selects the long form.
pub const LONG_ENV: &str = "PENSTOCK_LONG_TESTS";

/// Which form of a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Each promise once.
    Short,
    /// More faults, more repetitions, and what is measured on the way.
    Long,
}

impl Form {
    /// The form that [`LONG_ENV`] selects; short if it is not set.
    #[must_use]
    pub fn of_this_run() -> Self {
        match std::env::var_os(LONG_ENV).is_some_and(|value| value == "1") {
            true => Self::Long,
            false => Self::Short,
        }
    }

    /// The value for this form.
    pub fn pick<T>(self, short: T, long: T) -> T {
        match self {
            Self::Short => short,
            Self::Long => long,
        }
    }

    /// The word for it, as a program's argument.
    #[must_use]
    pub fn word(self) -> &'static str {
        self.pick("short", "long")
    }
}
