//! The demonstration's closing table.

use std::time::Duration;

/// Rows under a head; the last column is aligned to the right.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Default for Table {
    /// Of step, what was done, how long it took.
    fn default() -> Self {
        Self::new(&["step", "done and measured", "time"])
    }
}

impl Table {
    /// With this head.
    pub fn new(head: &[&str]) -> Self {
        Self {
            rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()],
        }
    }

    /// Adds a row.
    pub fn row(&mut self, step: &str, done: &str, took: Duration) {
        self.cells(&[step, done, &seconds(took)]);
    }

    /// Adds a row of as many cells as the head has.
    pub fn cells(&mut self, cells: &[&str]) {
        self.rows
            .push(cells.iter().map(|cell| (*cell).to_owned()).collect());
    }

    /// Prints all rows to stdout.
    pub fn print(&self) {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                if column + 1 == columns {
                    line.push_str(&format!("{cell:>width$}"));
                } else {
                    line.push_str(&format!("{cell:<width$}  "));
                }
            }
            println!("{line}");
        }
    }
}

/// As tables show it.
pub fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
