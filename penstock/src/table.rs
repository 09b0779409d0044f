//! Aligned columns for people.

use std::io::{self, Write};

/// Gap between columns.
const GAP: &str = "  ";

/// Rows under a heading. Columns named in `right` are right-aligned (numbers and sizes).
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings; a heading that starts with `>` makes its column right-aligned.
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let first = headings
            .iter()
            .map(|h| h.trim_start_matches('>').to_owned())
            .collect();
        Table {
            rows: vec![first],
            right,
        }
    }

    /// Adds a row; it has as many cells as there are headings.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.right.len(), "row width");
        self.rows.push(cells.into());
    }

    /// Prints the table. An empty one prints its headings only, so that scripts and people see the listing
    /// worked.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        self.print_from(0, out)
    }

    /// Prints the rows without the headings, to go on under those printed before.
    pub fn print_rows(&self, out: &mut impl Write) -> io::Result<()> {
        self.print_from(1, out)
    }

    fn print_from(&self, first: usize, out: &mut impl Write) -> io::Result<()> {
        let widths: Vec<usize> = (0..self.right.len())
            .map(|i| {
                self.rows
                    .iter()
                    .map(|r| r[i].chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        for row in &self.rows[first..] {
            let mut line = String::new();
            for (i, cell) in row.iter().enumerate() {
                let width = widths[i];
                if i > 0 {
                    line.push_str(GAP);
                }
                if self.right[i] {
                    line.push_str(&format!("{cell:>width$}"));
                } else {
                    line.push_str(&format!("{cell:<width$}"));
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_not_padded() {
        let mut t = Table::new(["NAME", ">SIZE", "STATE"]);
        t.row(["a".into(), "10G".into(), "ok".into()]);
        t.row(["longer".into(), "1G".into(), "x".into()]);
        let mut out = Vec::new();
        t.print(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "NAME    SIZE  STATE\na        10G  ok\nlonger    1G  x\n"
        );
    }
}
