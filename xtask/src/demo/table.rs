//! The demonstration's closing table.

use std::time::Duration;

/// Rows of step, what was done, how long it took.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<[String; 3]>,
}

impl Table {
    /// Adds a row.
    pub fn row(&mut self, step: &str, done: &str, took: Duration) {
        self.rows.push([
            step.to_owned(),
            done.to_owned(),
            format!("{:.2} s", took.as_secs_f64()),
        ]);
    }

    /// Prints all rows to stdout.
    pub fn print(&self) {
        let head = ["step", "done and measured", "time"].map(str::to_owned);
        let width = |column: usize| {
            self.rows
                .iter()
                .chain([&head])
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or_default()
        };
        let (first, second, third) = (width(0), width(1), width(2));
        for [step, done, took] in [&head].into_iter().chain(&self.rows) {
            println!("{step:<first$}  {done:<second$}  {took:>third$}");
        }
    }
}
