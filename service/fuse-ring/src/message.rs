//! Reads a message from an entry's memory, and writes its answer there.

use crate::layout::{
    COMMIT_ID_AT, HEADER, IN_HEADER_BYTES, OPERATION, OPERATION_BYTES_MAX, OUT_HEADER_BYTES, PAYLOAD_BYTES_AT, number,
    out_header,
};
use crate::memory::{Desk, PAYLOAD};
use std::ops::Range;

impl Desk {
    /// The number of the request that the kernel has put here, and where its message is, made up as one piece; nothing when it
    /// cannot be one.
    pub fn message(&mut self) -> (u64, Option<Range<usize>>) {
        let bytes = self.bytes();
        let [request, payload] = [COMMIT_ID_AT, PAYLOAD_BYTES_AT].map(|at| number(bytes, at));
        // The upper half of its word is filling.
        let payload = (payload & u64::from(u32::MAX)) as usize;
        let whole = (number(bytes, HEADER) & u64::from(u32::MAX)) as usize;
        let operation = whole.checked_sub(payload).and_then(|head| head.checked_sub(IN_HEADER_BYTES));
        let operation = operation.filter(|&bytes| bytes <= OPERATION_BYTES_MAX);
        let (Some(operation), true) = (operation, payload <= self.payload_bytes()) else { return (request, None) };
        let start = PAYLOAD - operation - IN_HEADER_BYTES;
        let bytes = self.bytes();
        bytes.copy_within(HEADER..HEADER + IN_HEADER_BYTES, start);
        bytes.copy_within(OPERATION..OPERATION + operation, start + IN_HEADER_BYTES);
        (request, Some(start..PAYLOAD + payload))
    }

    /// Puts an answer, whose body begins at `body`, where the kernel looks for it.
    pub fn answer(&mut self, request: u64, body: usize, outcome: Result<usize, i32>) {
        let (length, error) = outcome.map_or_else(|errno| (0, -errno), |length| (length, 0));
        let bytes = self.bytes();
        if body != PAYLOAD {
            bytes.copy_within(body..body + length, PAYLOAD);
        }
        bytes[HEADER..][..OUT_HEADER_BYTES].copy_from_slice(&out_header(request, error, length));
        bytes[PAYLOAD_BYTES_AT..][..8].copy_from_slice(&(length as u64).to_ne_bytes());
    }
}
