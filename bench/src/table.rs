//! Tables of medians and ratios.

use std::fmt::Write;

/// Medians in nanoseconds, one row an operation, one column a target.
pub struct Table {
    /// Headings of the columns; the first one is compared with every other.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// One operation.
pub struct Row {
    /// Its name.
    pub title: String,
    /// A median for each column, nanoseconds.
    pub medians: Vec<f64>,
}

impl Table {
    /// As Markdown: medians in microseconds, in brackets how many times the first column's time it is.
    pub fn markdown(&self) -> String {
        let mut text = format!("| operation, us | {} |\n|---|", self.columns.join(" | "));
        text.push_str(&"---|".repeat(self.columns.len()));
        text.push('\n');
        for row in &self.rows {
            let first = row.medians.first().copied().unwrap_or(0.0);
            let _ = write!(text, "| {} |", row.title);
            for (column, median) in row.medians.iter().enumerate() {
                let _ = write!(text, " {:.2}", median / 1000.0);
                if column > 0 && first > 0.0 {
                    let _ = write!(text, " ({:.2}x)", median / first);
                }
                text.push_str(" |");
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_microseconds_and_ratios() {
        let table = Table {
            columns: vec!["a".into(), "b".into()],
            rows: vec![Row { title: "x".into(), medians: vec![1000.0, 2500.0] }],
        };
        assert!(table.markdown().contains("| x | 1.00 | 2.50 (2.50x) |"), "{}", table.markdown());
    }
}
