-- API keys, by name.

-- name: insert_key
INSERT INTO runtime.api_keys (tenant_id, id, name, secret_hash, scopes, expires_at)
VALUES (%(tenant_id)s, %(id)s, %(name)s, %(secret_hash)s, %(scopes)s, %(expires_at)s)
RETURNING created_at;

-- name: find_key
-- A key that may be used now, by its public id.
SELECT tenant_id, id, name, secret_hash, scopes, created_at, expires_at
FROM runtime.api_keys
WHERE id = %(id)s AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now());

-- name: touch_key
UPDATE runtime.api_keys SET last_used_at = now()
WHERE id = %(id)s AND (last_used_at IS NULL OR last_used_at < now() - interval '1 minute');

-- name: list_keys
SELECT id, name, scopes, created_at, expires_at, revoked_at, last_used_at
FROM runtime.api_keys WHERE tenant_id = %(tenant_id)s ORDER BY created_at, id;

-- name: revoke_key
UPDATE runtime.api_keys SET revoked_at = coalesce(revoked_at, now())
WHERE tenant_id = %(tenant_id)s AND id = %(id)s
RETURNING id;

-- name: key_exists
SELECT id FROM runtime.api_keys WHERE id = %(id)s;
