//! Aligned columns for people.

use std::io::{self, Write};

/// Gap between columns.
const GAP: &str = "  ";
/// No column gets narrower than that for want of room.
const WRAPPED_MIN: usize = 16;

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
        self.print_from(0, None, out)
    }

    /// Prints the table in lines of at most `width` characters, if possible: long cells are wrapped.
    pub fn print_within(&self, width: Option<usize>, out: &mut impl Write) -> io::Result<()> {
        self.print_from(0, width, out)
    }

    /// Prints the rows without the headings, to go on under those printed before.
    pub fn print_rows(&self, out: &mut impl Write) -> io::Result<()> {
        self.print_from(1, None, out)
    }

    fn print_from(
        &self,
        first: usize,
        width: Option<usize>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let widths = match width {
            Some(width) => narrowed(self.widths(), width),
            None => self.widths(),
        };
        for row in &self.rows[first..] {
            let cells = row.iter().zip(&widths);
            let cells: Vec<Vec<String>> =
                cells.map(|(cell, width)| wrapped(cell, *width)).collect();
            let height = cells.iter().map(Vec::len).max().unwrap_or(0);
            for number in 0..height {
                let parts = cells
                    .iter()
                    .map(|cell| cell.get(number).map_or("", String::as_str));
                writeln!(out, "{}", self.line(parts, &widths))?;
            }
        }
        Ok(())
    }

    /// The characters of each column's longest cell.
    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| self.rows.iter().map(move |row| row[column].chars().count());
        let widths = (0..self.right.len()).map(|column| width(column).max().unwrap_or(0));
        widths.collect()
    }

    fn line<'a>(&self, parts: impl Iterator<Item = &'a str>, widths: &[usize]) -> String {
        let aligned = parts.zip(widths).zip(&self.right);
        let aligned = aligned.map(|((part, width), right)| match *right {
            true => format!("{part:>width$}"),
            false => format!("{part:<width$}"),
        });
        let line = aligned.collect::<Vec<_>>().join(GAP);
        line.trim_end().to_owned()
    }
}

/// Widths of columns that fit a line: what is too long for it is shared by the columns that are long. Where
/// even that is too narrow to be read, lines are longer.
fn narrowed(mut widths: Vec<usize>, line: usize) -> Vec<usize> {
    let gaps = GAP.len() * widths.len().saturating_sub(1);
    if widths.iter().sum::<usize>() + gaps <= line {
        return widths;
    }
    let (mut left, mut long) = (line.saturating_sub(gaps), widths.len());
    let mut in_order: Vec<usize> = (0..widths.len()).collect();
    in_order.sort_by_key(|column| widths[*column]);
    for column in in_order {
        // The longer ones have what the shorter ones leave.
        widths[column] = widths[column].min((left / long).max(WRAPPED_MIN));
        left = left.saturating_sub(widths[column]);
        long -= 1;
    }
    widths
}

/// Wraps a text to lines of at most `width` characters. A word that is longer stays whole.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    if text.chars().count() <= width {
        return vec![text.to_owned()];
    }
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        let taken = line.chars().count();
        if taken > 0 && taken + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
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

    #[test]
    fn long_cells_take_several_lines_of_a_narrow_terminal() {
        let mut table = Table::new(["NO", "WHAT", "DO"]);
        table.row([
            "1".into(),
            "node n3 is down since a while".into(),
            "start it again".into(),
        ]);
        table.row(["2".into(), "short".into(), String::new()]);
        let printed = |width| {
            let mut out = Vec::new();
            table.print_within(width, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            printed(Some(40)),
            "NO  WHAT                  DO\n\
             1   node n3 is down       start it again\n\
             \x20   since a while\n\
             2   short\n"
        );
        for width in [None, Some(200)] {
            assert_eq!(printed(width).lines().count(), 3);
        }
        // Words are not cut, nor columns made too narrow to be read.
        assert_eq!(
            printed(Some(1)).lines().nth(1),
            Some("1   node n3 is down   start it again")
        );
    }
}
