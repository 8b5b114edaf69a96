-- The registry of adapters: what exists, what should be resident, what serves.

-- name: insert_adapter
-- Nothing where the tenant's domain has these very weights already.
INSERT INTO flywheel.adapters
    (tenant_id, name, digest, base, domain, folder, stage, cycle_id, manifest)
VALUES
    (%(tenant_id)s, %(name)s, %(digest)s, %(base)s, %(domain)s, %(folder)s, %(stage)s,
     %(cycle_id)s, %(manifest)s)
ON CONFLICT DO NOTHING
RETURNING name;

-- name: register_policy
SELECT runtime.register_policy_v1(%(tenant_id)s, %(policy)s);

-- name: get_adapter
SELECT tenant_id, name, digest, base, domain, folder, stage, cycle_id, status, loaded, manifest,
       decision, created_at
FROM flywheel.adapters
WHERE tenant_id = %(tenant_id)s AND name = %(name)s;

-- name: find_by_digest
SELECT tenant_id, name, digest, base, domain, folder, stage, cycle_id, status, loaded, manifest,
       decision, created_at
FROM flywheel.adapters
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND digest = %(digest)s;

-- name: list_adapters
-- Newest first.
SELECT tenant_id, name, digest, base, domain, folder, stage, cycle_id, status, loaded, manifest,
       decision, created_at
FROM flywheel.adapters
WHERE tenant_id = %(tenant_id)s AND (%(domain)s::text IS NULL OR domain = %(domain)s)
ORDER BY created_at DESC, name DESC
LIMIT %(limit)s;

-- name: desired_adapters
-- What every tenant wants resident; what an alias resolves to, which is always wanted, comes first,
-- then the newest.
SELECT tenant_id, name, digest, base, domain, folder, stage, cycle_id, status, loaded, manifest,
       decision, created_at
FROM flywheel.adapters AS adapter,
     LATERAL (SELECT EXISTS (SELECT FROM runtime.aliases_v1 AS alias
                             WHERE alias.tenant_id = adapter.tenant_id
                               AND alias.policy ->> 'id' = adapter.name) AS aliased) AS needed
WHERE loaded OR aliased
ORDER BY aliased DESC, created_at DESC, name DESC;

-- name: residents
-- Of the names an engine serves, the registered ones, and what still needs each of them.
SELECT adapter.tenant_id, adapter.name, adapter.stage, adapter.cycle_id, adapter.created_at,
       adapter.loaded,
       EXISTS (SELECT FROM runtime.aliases_v1 AS alias
               WHERE alias.tenant_id = adapter.tenant_id
                 AND alias.policy ->> 'id' = adapter.name) AS aliased,
       EXISTS (SELECT FROM runtime.runs_v1 AS run
               WHERE run.tenant_id = adapter.tenant_id AND run.policy_id = adapter.name
                 AND (run.state = 'queued' OR run.state = 'running')) AS in_use
FROM flywheel.adapters AS adapter
WHERE adapter.name = ANY(%(names)s)
ORDER BY adapter.created_at, adapter.name;

-- name: aliases_of
SELECT domain, alias FROM runtime.aliases_v1
WHERE tenant_id = %(tenant_id)s AND policy ->> 'id' = %(name)s
ORDER BY domain, alias;

-- name: set_loaded
-- What an alias resolves to stays loaded, whatever is said.
UPDATE flywheel.adapters AS adapter
SET loaded = %(loaded)s OR EXISTS (SELECT FROM runtime.aliases_v1 AS alias
                                   WHERE alias.tenant_id = adapter.tenant_id
                                     AND alias.policy ->> 'id' = adapter.name)
WHERE tenant_id = %(tenant_id)s AND name = %(name)s;

-- name: set_status
UPDATE flywheel.adapters SET status = %(status)s
WHERE tenant_id = %(tenant_id)s AND name = %(name)s;

-- name: set_decision
-- A candidate that the gate rejects is rejected from then on.
UPDATE flywheel.adapters
SET decision = %(decision)s,
    status = CASE WHEN %(outcome)s = 'reject' AND status = 'candidate' THEN 'rejected'
                  ELSE status END
WHERE tenant_id = %(tenant_id)s AND name = %(name)s;
