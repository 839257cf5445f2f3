"""What links cost: pure functions of sizes, rates and seeds, without torch and without side effects."""
