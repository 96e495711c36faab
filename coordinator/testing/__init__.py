"""What users run against their own service and database: the drill (conflicts and crashes, audited from outside)."""
