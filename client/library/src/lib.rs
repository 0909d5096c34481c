//! The front driver.
#![no_std]
